"""Every peer by its name."""

from __future__ import annotations

from loadtest.peers.llama_cpp import LLAMA_CPP, LLAMA_CPP_BF16
from loadtest.peers.peer import EnginePeer, Peer, RouterPeer
from loadtest.peers.place import PeerError
from loadtest.peers.routers import SGLANG_ROUTER, SMG, VLLM_ROUTER
from loadtest.peers.vllm_cpu import VllmCpu

_ENGINES: tuple[EnginePeer, ...] = (VllmCpu(), LLAMA_CPP, LLAMA_CPP_BF16)
_ROUTERS: tuple[RouterPeer, ...] = (VLLM_ROUTER, SMG, SGLANG_ROUTER)

ENGINES = {peer.name: peer for peer in _ENGINES}
ROUTERS = {peer.name: peer for peer in _ROUTERS}


def peer_named(name: str) -> Peer:
    """Any of them. Raises PeerError, which lists them all."""
    found: Peer | None = ENGINES.get(name) or ROUTERS.get(name)
    if found is None:
        raise PeerError(f"{name}: no such peer; there are {', '.join((*ENGINES, *ROUTERS))}")
    return found
