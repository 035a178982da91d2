"""nginx.conf: well-formed, in front of both gateways, and nothing held back on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.deploy.stack import in_repository, seconds, services, settings_of

_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|([{};])|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s{};"'#]\S*?(?=[\s;{}]))"""
)


@dataclass(slots=True)
class Directive:
    """`name arguments...;`, or with a block of others."""

    name: str
    arguments: list[str]
    block: list[Directive] | None = None

    def all(self, name: str) -> Iterator[Directive]:
        """Those of this name in the block, at any depth."""
        for each in self.block or []:
            if each.name == name:
                yield each
            yield from each.all(name)

    def one(self, name: str) -> Directive:
        """The only one of this name directly in the block."""
        [found] = [each for each in self.block or [] if each.name == name]
        return found

    def value(self, name: str) -> str:
        """The arguments of the only one of this name directly in the block."""
        return " ".join(self.one(name).arguments)


@dataclass(slots=True)
class Parser:
    """nginx's grammar: words up to `;`, or up to a block in braces."""

    tokens: list[str]
    at: int = 0
    words: list[str] = field(default_factory=list)

    def block(self, *, closed: bool) -> list[Directive]:
        found = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == ";":
                assert self.words, "a semicolon that ends nothing"
                found.append(Directive(self.words[0], self.words[1:]))
                self.words = []
            elif token == "{":
                assert self.words, "a block without a name"
                name, *arguments = self.words
                self.words = []
                found.append(Directive(name, arguments, self.block(closed=True)))
            elif token == "}":
                assert closed, "a brace that closes nothing"
                assert not self.words, f"no semicolon after {self.words}"
                return found
            else:
                self.words.append(token)
        assert not closed, "a block that is not closed"
        assert not self.words, f"no semicolon after {self.words}"
        return found


def parsed(source: str) -> Directive:
    tokens, end = [], 0
    for found in _TOKEN.finditer(source):
        assert found.start() == end, source[end : found.start()]
        end = found.end()
        if word := found[1] or found[2]:
            tokens.append(word)
    assert end == len(source), source[end:]
    return Directive("", [], Parser(tokens).block(closed=False))


def conf() -> Directive:
    return parsed(in_repository(services()["proxy"], "/etc/nginx/nginx.conf").read_text())


def server() -> Directive:
    return conf().one("http").one("server")


def location(path: str) -> Directive:
    [found] = [each for each in server().all("location") if each.arguments[-1] == path]
    return found


def test_the_parser_finds_what_nginx_would() -> None:
    tree = parsed("a 1; # {\nb \"x;}\" { c; d e { f '#'; } }\n")
    assert [each.name for each in tree.block or []] == ["a", "b"]
    assert tree.one("b").arguments == ['"x;}"']
    assert [each.arguments for each in tree.all("f")] == [["'#'"]]
    for wrong in ("a", "a 1 }", "a { b; ", "a { b }", ";", "{ }"):
        try:
            parsed(wrong + "\n")
        except AssertionError:
            continue
        raise AssertionError(f"{wrong!r} was taken")


def test_both_gateways_are_behind_it_as_they_listen() -> None:
    upstream = conf().one("http").one("upstream")
    assert location("/").value("proxy_pass") == f"http://{upstream.arguments[0]}"
    servers = {each.arguments[0] for each in upstream.all("server")}
    gateways = [name for name in services() if name.startswith("gateway")]
    assert servers == {f"{name}:{settings_of(name, 'cpu').server.port}" for name in gateways}
    for name in gateways:
        assert set(services()[name]["networks"]) & set(services()["proxy"]["networks"])
        # Whoever closes an idle connection first must not be the one that gets the next request.
        idle_s = seconds(upstream.value("keepalive_timeout"))
        assert idle_s < settings_of(name, "cpu").server.keep_alive_s
        assert int(upstream.value("keepalive")) > 0


def test_tokens_go_on_as_they_come() -> None:
    at = location("/")
    assert at.value("proxy_buffering") == "off"
    assert at.value("proxy_cache") == "off"
    assert at.value("gzip") == "off"
    assert at.value("proxy_http_version") == "1.1"
    assert at.value("client_max_body_size") == "0"
    assert seconds(at.value("proxy_read_timeout")) >= 600
    headers = {each.arguments[0]: each.arguments[1] for each in at.all("proxy_set_header")}
    assert headers["Connection"] == '""'
    assert headers["X-Forwarded-For"] == "$remote_addr"


def test_a_request_that_was_sent_is_not_sent_twice() -> None:
    conditions = location("/").one("proxy_next_upstream").arguments
    assert conditions == ["error", "timeout"]


def test_the_operators_paths_stay_inside() -> None:
    for path in ("/metrics", "/admin"):
        assert location(path).one("return").arguments == ["404"]


def test_it_logs_no_keys_and_writes_where_it_may() -> None:
    http = conf().one("http")
    assert not re.search(
        r"\$(http_|request\b(?!_)|args|cookie|request_uri)", http.value("log_format")
    )
    service = services()["proxy"]
    written = [conf().value("pid")]
    written += [each.arguments[0] for each in http.block or [] if each.name.endswith("temp_path")]
    assert all(path.startswith(tuple(f"{root}/" for root in service["tmpfs"])) for path in written)
    assert service["ports"] == [f"127.0.0.1:8000:{server().value('listen')}"]
