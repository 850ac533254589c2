"""Checks after a weight sync that every server has, tensor by tensor, what the trainer exported.

SGLang's /weights_checker (source of 0.5.21) returns, for each rank, name -> first 16 hex digits of
the sha256 of the tensor's bytes, as long as it runs on the CPU.  Its tensors are fused: q, k and v;
gate and up; all experts of a layer.  The same tensors are hashed on rank 0 while a second export
streams by, part after part in the server's order, so none is ever built.

Every tensor of a server with one rank is compared; of a server with several ranks only those that
each rank has as a whole (routers, norms).  A server on a GPU hashes in another way, so such servers
are compared with one another.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_rl.weights.sync.servers import Json, Servers, WeightPushError

logger = logging.getLogger(__name__)

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
}  # fmt: skip
"""HF's name of a module -> SGLang's, and the index of its rows in that."""
WHOLE_ON_EVERY_RANK = re.compile(
    r"norm|\.gate\.|e_score_correction_bias|_with_mqa|shared_expert_gate"
)
PADDED, ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
"""Servers add rows of zeros to these, to a multiple of ROWS (DEFAULT_VOCAB_PADDING_SIZE)."""
HIDDEN_UNITS = re.compile(r"\.(?:(gate_proj|up_proj|w1|w3)\.\w+|(?:down_proj|w2)\.weight)$")
UNITS = 32
"""Servers on the CPU fill up the intermediate size of every MLP to a multiple of it
(DEFAULT_MOE_PADDING_SIZE).
"""
ROUTER = re.compile(r"\.gate\.(weight|e_score_correction_bias)$")
"""Tensors that servers may keep in float32 beside a bfloat16 model: GLM-4.5's routers."""
HEX_DIGITS = 16
SHOWN = 5


class ExportDigests:
    """Hashes of the tensors that a server makes of an export."""

    def __init__(self, names: Iterable[str]) -> None:
        """Plan the hashes; `names` are all tensors of the export."""
        places = {name: served_place(name) for name in names}
        self.parts: dict[str, list[str]] = {}
        """Server's name -> the HF tensors in it, in order."""
        for name in sorted(places, key=lambda name: places[name]):
            self.parts.setdefault(places[name][0], []).append(name)
        fused_modules = tuple(fused for fused, _ in FUSED.values())
        for served, parts in list(self.parts.items()):
            if len(parts) == 1 and served.rpartition(".")[0].endswith(fused_modules):
                # latent attention has a q_proj without k and v
                self.parts[parts[0]] = self.parts.pop(served)
        self.served = {name: served for served, parts in self.parts.items() for name in parts}
        self.hashes = {served: hashlib.sha256() for served in self.parts}
        self.float32_hashes = {
            served: hashlib.sha256() for served in self.parts if ROUTER.search(served)
        }
        self.missing = {served: list(parts) for served, parts in self.parts.items()}
        self.waiting: dict[str, torch.Tensor] = {}
        """Tensors that came before their turn."""
        self.filled_up: set[str] = set()
        """Server's names of the tensors that servers fill up with zeros."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash a tensor, of any layout, in the dtype of the servers.

        One that comes before its turn is kept until then, on the host.
        """
        # a copy: numpy() below fixes the size of a CPU tensor's storage, which offload changes
        self.waiting[name] = tensor.detach().to("cpu", copy=True)
        served = self.served[name]
        hidden = HIDDEN_UNITS.search(name)
        if hidden and tensor.shape[0 if hidden[1] else -1] % UNITS:
            self.filled_up.add(served)
        # a sha256 needs the parts in the server's order
        missing = self.missing[served]
        while missing and missing[0] in self.waiting:
            part = self.waiting.pop(missing.pop(0)).contiguous()
            self.hashes[served].update(bytes_of(part))
            if served in self.float32_hashes:
                self.float32_hashes[served].update(bytes_of(part.float()))
            if served.endswith(PADDED):
                self.hashes[served].update(bytes(-len(part) % ROWS * part[0].nbytes))

    def digests(self) -> dict[str, str]:
        """Return server's name -> checksum.

        Tensors that are not complete, or that servers fill up, are left out.
        """
        return {
            served: digest.hexdigest()[:HEX_DIGITS]
            for served, digest in self.hashes.items()
            if not self.missing[served] and served not in self.filled_up
        }

    def float32_digests(self) -> dict[str, str]:
        """Return the same of the tensors that servers may keep in float32, in float32."""
        return {
            served: digest.hexdigest()[:HEX_DIGITS]
            for served, digest in self.float32_hashes.items()
            if not self.missing[served]
        }


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def served_place(name: str) -> tuple[str, int]:
    """Return the server's name of the tensor that contains this HF tensor, and its index in it."""
    if match := EXPERT.fullmatch(name):
        prefix, expert, part = match.groups()
        if part in ("down_proj", "w2"):
            return f"{prefix}.w2_weight", int(expert)
        return f"{prefix}.w13_weight", 2 * int(expert) + (part in ("up_proj", "w3"))
    module, _, suffix = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    fused, place = FUSED.get(last, (last, 0))
    return ".".join(filter(None, (parent, fused, suffix))), place


class Verifier:
    """Compares servers with an export.  Logs once for each server what cannot be compared."""

    def __init__(self) -> None:
        self.logged: set[str] = set()

    def any_on_cpu(self, servers: Servers) -> bool:
        """Return True where an export must be hashed.

        Servers on GPUs are compared with one another.
        """
        return "cpu" in servers.each(lambda url: self._device(servers, url))

    def verify(self, servers: Servers, digests: ExportDigests | None, what: str) -> int:
        """Return the number of equal tensors over all servers.

        `digests` are those of the export, or None where no server is on the CPU; `what` names it in
        messages.  Raises WeightPushError for tensors that differ.
        """
        compared = 0
        on_gpus: dict[str, list[dict[str, str]]] = {}
        answers = servers.each(lambda url: self._ask(servers, url))
        for url, (device, ranks) in zip(servers.urls, answers, strict=True):
            if not ranks:
                continue
            if digests is None or device != "cpu":
                on_gpus[url] = ranks
                continue
            compared += self._compare(url, ranks, digests, what)
        return compared + self._compare_servers(on_gpus, what)

    def _ask(self, servers: Servers, url: str) -> tuple[str, list[dict[str, str]]]:
        """Return the server's device, and name -> checksum of each of its ranks.

        There are no ranks where the server has no checksums.
        """
        device = self._device(servers, url)
        response = servers.request(
            "POST", url, "/weights_checker", {"action": "checksum", "selector": "target"}
        )
        if response.status_code != 200:
            self._log(
                f"{url}: its weights are not verified: /weights_checker answered"
                f" {response.status_code}: {response.text[:200]}"
            )
            return device, []
        answer: Json = response.json()
        return device, [rank["checksums"] for rank in answer.get("ranks") or []]

    @staticmethod
    def _device(servers: Servers, url: str) -> str:
        return str(servers.info(url).get("device"))

    def _compare(
        self,
        url: str,
        ranks: Sequence[Mapping[str, str]],
        digests: ExportDigests,
        what: str,
    ) -> int:
        """Return the number of this server's tensors that equal the export's.

        Raises WeightPushError where one differs, or where none can be compared.
        """
        ours, in_float32 = digests.digests(), digests.float32_digests()
        comparable = {name for name in ours if len(ranks) == 1 or WHOLE_ON_EVERY_RANK.search(name)}
        # names that any rank has
        served = set().union(*ranks)
        comparable &= served
        if not comparable:
            raise WeightPushError(
                f"server {url}: none of its {len(served)} tensors can be compared with the"
                f" trainer's export, all have other names: {shown_names(sorted(served))}; to run"
                " without this check, set rollout.verify_push = version"
            )
        wrong = sorted(
            {
                name
                for rank in ranks
                for name in comparable
                if rank.get(name) not in (ours[name], in_float32.get(name, ours[name]))
            }
        )
        if wrong:
            named = "; ".join(
                f"{name} (of {shown_names(digests.parts[name])})" for name in wrong[:SHOWN]
            )
            raise WeightPushError(
                f"server {url} does not hold the weights of {what}:"
                f" {len(wrong)} of {len(comparable)} tensors have another checksum: {named}; it"
                " must load what it gets unchanged: look for quantisation in its settings, and for"
                " errors in its log"
            )
        left = sorted(served.symmetric_difference(ours) | (set(ours) - comparable))
        if left:
            self._log(
                f"{url}: {len(comparable)} tensors verified, {len(left)} not comparable:"
                f" {shown_names(left)}"
            )
        return len(comparable)

    def _compare_servers(
        self, on_gpus: Mapping[str, Sequence[Mapping[str, str]]], what: str
    ) -> int:
        """Return the number of equal tensors of servers on GPUs.

        Servers with the same number of ranks must have the same checksums.
        """
        first: dict[int, str] = {}
        compared = 0
        for url, ranks in on_gpus.items():
            if (other := first.setdefault(len(ranks), url)) == url:
                self._log(
                    f"{url}: on a GPU checksums are compared between servers only, not with the"
                    " trainer's export"
                )
                continue
            for one, two in zip(ranks, on_gpus[other], strict=True):
                if wrong := sorted(name for name in {*one, *two} if one.get(name) != two.get(name)):
                    raise WeightPushError(
                        f"servers {url} and {other} differ in the weights of {what}:"
                        f" {len(wrong)} tensors have another checksum: {shown_names(wrong)}; one of"
                        " them loaded what it got wrongly: restart both"
                    )
                compared += len(one)
        return compared

    def _log(self, line: str) -> None:
        if line not in self.logged:
            self.logged.add(line)
            logger.warning("verify_push = checksum: %s", line)


def shown_names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)})" if len(names) > SHOWN else "")
