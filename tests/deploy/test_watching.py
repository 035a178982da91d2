"""Prometheus and Grafana: what they scrape is there, and what they ask for is measured."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from gateway.metrics import Metrics
from gateway.slo.admission import Admission
from gateway.slo.windowed_book import WindowedSloBook
from gateway.slo_metrics import SloCollector
from gateway.tenants import Tenant
from policies.slo import Slo
from tests.deploy.stack import PROFILES, ROOT, in_repository, is_forebay, services, settings_of

_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
}


@cache
def measured() -> dict[str, frozenset[str]]:
    """The label names of all series that a gateway or worker may expose, by name."""
    registry = Metrics(models=["m"], tenants=["t"], secret=b"secret")._registry
    promises = SloCollector()  # says nothing as long as there is no book
    promises.watch(WindowedSloBook(), Admission())
    found: dict[str, frozenset[str]] = {}
    # The client tells the labels of a metric without samples in its private attributes alone.
    for collector in [*registry._collector_to_names, promises]:
        families = [collector] if hasattr(collector, "_labelnames") else collector.collect()
        for family in families:
            name, kind = (
                (family._name, family._type) if family is collector else (family.name, family.type)
            )
            for suffix in _SUFFIXES[kind]:
                found[name + suffix] = frozenset(family._labelnames)
    return found


def asked_for(expression: str) -> set[str]:
    return set(re.findall(r"\bforebay_\w+", re.sub(r'"[^"]*"', "", expression)))


def check_labels(expression: str, shown: str = "") -> None:
    """Every label in the expression, and in the text shown with it, is one that is there."""
    everywhere = {"job", "instance"}
    for name, selector in re.findall(r"\b(forebay_\w+)(?:\{([^}]*)\})?", expression):
        used = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", selector))
        assert used <= measured()[name] | everywhere, expression
    names = asked_for(expression)
    kept = set.intersection(*(set(measured()[name]) for name in names)) | everywhere
    groups = [set(re.split(r",\s*", each)) for each in re.findall(r"by \(([^)]*)\)", expression)]
    for group in groups:
        assert group <= kept | {"le"}, expression
    in_text = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", shown))
    assert in_text <= (set.intersection(*groups) if groups else kept), shown


def dashboard() -> dict[str, Any]:
    path = in_repository(services()["grafana"], "/var/lib/grafana/dashboards/forebay.json")
    tree = json.loads(path.read_text())
    assert isinstance(tree, dict)
    return tree


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_the_dashboard_shows_what_is_measured() -> None:
    wanted = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in asked_for(target["expr"])
    }
    wanted |= {
        name
        for variable in dashboard()["templating"]["list"]
        for name in asked_for(variable["query"]["query"])
    }
    assert len(wanted) > 25
    assert wanted - measured().keys() == set()
    for panel in panels():
        for target in panel["targets"]:
            check_labels(target["expr"], target["legendFormat"])


def alerts() -> list[dict[str, Any]]:
    tree = yaml.safe_load(
        in_repository(services()["prometheus"], "/etc/prometheus/alerts.yml").read_text()
    )
    return [rule for group in tree["groups"] for rule in group["rules"]]


def test_alerts_are_about_what_is_measured() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule.get("labels", {"severity": "page"})["severity"] in ("page", "ticket")
        for opening, closing in ("()", "{}", "[]"):
            assert rule["expr"].count(opening) == rule["expr"].count(closing), rule["alert"]
        assert asked_for(rule["expr"])
        assert asked_for(rule["expr"]) - measured().keys() == set(), rule["alert"]
        assert rule["annotations"]["summary"]
        check_labels(rule["expr"], rule["annotations"]["summary"])


def test_burning_budgets_ring_in_two_windows_and_not_for_a_few_requests() -> None:
    burning = {
        rule["alert"]: rule["expr"] for rule in alerts() if "forebay_slo_burn_rate" in rule["expr"]
    }
    assert len(burning) == 2
    told = {
        sample.labels["window"]
        for family in _burns()
        if family.name == "forebay_slo_burn_rate"
        for sample in family.samples
    }
    for alert, expression in burning.items():
        windows = re.findall(r'window="(\w+)"', expression)
        assert set(windows) <= told, alert
        thresholds = re.findall(r"forebay_slo_burn_rate.*?\) > (\d+)", expression)
        assert len(windows) == len(thresholds) == 2, alert
        assert len(set(thresholds)) == 1, alert
        assert "increase(forebay_slo_requests_total" in expression, alert


def _burns() -> list[Metric]:
    """What is told once a tenant that was promised something has had a request."""
    book = WindowedSloBook()
    tenant = Tenant("t", slo=Slo(ttft_s=1.0))
    book.note(tenant, "m", promised=True, ttft_s=0.5, tpot_s=None, publish_s=0.5)
    collector = SloCollector()
    collector.watch(book, Admission())
    return list(collector.collect())


def test_everything_that_a_tenant_may_be_refused_for_is_shown() -> None:
    shown = {
        name for panel in panels() for each in panel["targets"] for name in asked_for(each["expr"])
    }
    assert {
        "forebay_goodput_rps",
        "forebay_slo_attainment",
        "forebay_slo_burn_rate",
        "forebay_limit_refusals_total",
        "forebay_limits_degraded",
        "forebay_admissions_total",
        "forebay_ledger_lag_seconds",
        "forebay_ledger_rows_total",
    } <= shown


def test_engines_are_measured_against_what_limits_them() -> None:
    shown = [each["expr"] for panel in panels() for each in panel["targets"]]
    assert [each for each in shown if re.search(r'forebay_mfu\{[^}]*kind="prefill"', each)]
    assert [each for each in shown if re.search(r'forebay_mbu\{[^}]*kind="decode"', each)]


def test_expressions_are_balanced_and_say_whose_series_they_mean() -> None:
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for opening, closing in ("()", "{}", "[]"):
                assert expression.count(opening) == expression.count(closing), expression
            named = re.findall(r'job="(\w+)"', expression)
            assert set(named) <= {"gateway", "worker"}


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (at["x"] + column, at["y"] + line)
            for column in range(at["w"])
            for line in range(at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_grafana_is_provisioned_with_both() -> None:
    grafana = services()["grafana"]
    root = in_repository(grafana, "/etc/grafana/provisioning")
    [source] = yaml.safe_load((root / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert set(grafana["networks"]) & set(services()["prometheus"]["networks"])
    used = {panel["datasource"]["uid"] for panel in panels()}
    used |= {target["datasource"]["uid"] for panel in panels() for target in panel["targets"]}
    assert used == {source["uid"]}
    [provider] = yaml.safe_load((root / "dashboards" / "forebay.yaml").read_text())["providers"]
    assert list(in_repository(grafana, provider["options"]["path"]).glob("*.json"))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_one_of_ours_is_scraped_by_its_own_address(profile: str) -> None:
    prometheus = services(profile)["prometheus"]
    tree = yaml.safe_load(in_repository(prometheus, "/etc/prometheus/prometheus.yml").read_text())
    for rules in tree["rule_files"]:
        assert in_repository(prometheus, rules).is_file()
    targets = {}
    for job in tree["scrape_configs"]:
        groups = list(job.get("static_configs", []))
        for files in job.get("file_sd_configs", []):
            for file in files["files"]:
                groups += yaml.safe_load(in_repository(prometheus, file).read_text())
        targets[job["job_name"]] = {target for group in groups for target in group["targets"]}
    ours = {name for name, service in services(profile).items() if is_forebay(service)}
    assert targets == {
        kind: {
            f"{name}:{settings_of(name, profile).server.port}"
            for name in ours
            if name.startswith(kind)
        }
        for kind in ("gateway", "worker")
    }
    for name in ours:
        assert set(services(profile)[name]["networks"]) & set(prometheus["networks"])


def test_nothing_in_deploy_is_left_over() -> None:
    """Every file is mounted into some service."""
    mounted = set()
    for profile in PROFILES:
        for service in services(profile).values():
            for entry in service.get("volumes", []):
                path = ROOT / entry.split(":")[0]
                if path.is_dir():
                    mounted |= {file for file in path.rglob("*") if file.is_file()}
                elif path.is_file():
                    mounted.add(path)
    assert {file for file in (ROOT / "deploy").rglob("*") if file.is_file()} == mounted
