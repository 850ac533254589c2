"""Make a tiny Qwen3-MoE checkpoint that partly knows a task: a real model for a real RL run on any
machine.

    # half a minute on two cores; returns immediately if it exists
    megatron-rl make-tiny-model runs/tiny_moe
    # calls of a calculator; --task ledger: long answers
    megatron-rl make-tiny-model runs/tiny_tools --task tools
    # a model that chats in Qwen3's format, with tools (minutes)
    megatron-rl make-tiny-model runs/tiny_chat --task chat

Writes an HF directory (config.json, model.safetensors, tokenizer) and two disjoint prompt
sets (train.jsonl, heldout.jsonl; rows {"prompt": "12+34=", "label": "46"}).  The model is
cold-started with supervision on its turns, then its output head is scaled down until a sample is
correct with probability `target_accuracy`: a policy whose accuracy RL can raise.

Shapes: B sequences of S tokens, as in tiny_text.py.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_rl_tools.options import parse_make_tiny_model
from megatron_rl_tools.tiny_chat import chat
from megatron_rl_tools.tiny_digest import digest_of
from megatron_rl_tools.tiny_tasks import TASKS, Examples, Stages
from megatron_rl_tools.tiny_text import Data, Language, characters

MANIFEST = "tiny_moe.json"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings on which the checkpoint's bytes depend, beside code and packages."""

    task: str = "sums"
    seed: int = 0
    target_accuracy: float = 0.3
    """Expected accuracy of one sample at temperature 1."""
    hidden_size: int = 96
    num_layers: int = 4
    """Even, because the demo also runs with two pipeline stages."""
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 64
    head_dim: int = 16
    """SGLang's rotary embedding on a GPU needs 64 at least."""
    num_heldout: int = 200
    batch_size: int = 128
    lr: float = 3e-3
    max_steps: int = 1500
    """The most steps before the skill appears."""
    skill: float = 0.5
    """Accuracy of a sample at which the learning rate starts to decay."""
    decay_steps: int = 200
    num_probes: int = 512
    """Prompts on which the accuracy is computed."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task = {self.task!r} must be one of {', '.join(TASKS)}")
        if not 0.0 < self.target_accuracy < 1.0:
            raise ValueError(f"target_accuracy = {self.target_accuracy} must lie between 0 and 1")
        if not 1 <= self.num_heldout <= 4000:
            raise ValueError(
                f"num_heldout = {self.num_heldout} must be in 1..4000: there are 8100 prompts"
                " in all"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k = {self.top_k} must be in 1..num_experts = {self.num_experts}")

    @property
    def digest(self) -> str:
        return digest_of(asdict(self))


def make_tiny_moe(out: Path, *, task: str = "sums", quiet: bool = False, **settings) -> Path:
    """Write the checkpoint and prompt sets to `out` and return it; does nothing if `out` was made
    with the same settings, code, packages and processor.

    The same settings give the same bytes on the same machine.  Raises ValueError for invalid
    settings, FileExistsError if `out` was not made by this tool, RuntimeError if `max_steps` did
    not reach the target.
    """
    out = Path(out)
    defaults = TASKS[task].settings if task in TASKS else {}
    recipe = Settings(task=task, **{**defaults, **settings})
    log = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    if is_made(out, recipe):
        log(
            f"{out}: up to date (seed {recipe.seed}, sampled accuracy"
            f" {read_recipe(out)['heldout_accuracy']:.3f})"
        )
        return out
    started = time.perf_counter()
    train, heldout = TASKS[task].make(recipe.seed, recipe.num_heldout)
    stages = TASKS[task].stages(train)
    language = language_of(task, stages)
    with deterministic_cpu(recipe.seed):
        model = Qwen3MoeForCausalLM(model_config(recipe, language.tokenizer))
        # HF starts the pad row at 0, where RMSNorm's gradient explodes once RL samples a pad
        with torch.no_grad():
            model.model.embed_tokens.weight[model.config.pad_token_id].normal_(
                std=model.config.initializer_range
            )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        log(
            f"tiny MoE: {num_parameters / 1e6:.2f} M parameters, {recipe.num_layers} layers x"
            f" {recipe.num_experts} experts, top-{recipe.top_k}; cold start on {len(train)} {task},"
            f" seed {recipe.seed}"
        )
        encode, free = language.encode, TASKS[task].free
        encoded = [(first, encode(examples, free)) for first, examples in stages]
        probes = [encode(part, free) for part in TASKS[task].probes(train, recipe.num_probes)]
        steps = cold_start(model, encoded, probes, recipe, log)
        accuracy = sampled_accuracy(model, encode(heldout, free))
    manifest = {
        "settings": asdict(recipe),
        "digest": recipe.digest,
        "steps": steps,
        "parameters": num_parameters,
        "heldout_accuracy": round(accuracy, 6),
    }
    unfinished = out.with_name(out.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    write_checkpoint(unfinished, model, language.tokenizer, manifest, train, heldout)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)
    log(
        f"{out}: held-out sampled accuracy {accuracy:.3f} after {steps} steps,"
        f" {time.perf_counter() - started:.1f} s"
    )
    return out


def language_of(task: str, stages: Stages) -> Language:
    return chat(stages[-1][1]) if TASKS[task].language == "chat" else characters()


def is_made(out: Path, recipe: Settings) -> bool:
    """Return whether `out` was made with these settings, and as it would be made now.

    Raises FileExistsError if this tool did not write it.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / MANIFEST).is_file():
        raise FileExistsError(
            f"{out} exists and has no {MANIFEST}: not written by this tool; choose another"
            " directory"
        )
    return read_recipe(out).get("digest") == recipe.digest


def read_recipe(out: Path) -> dict:
    return json.loads((out / MANIFEST).read_text())


# Model --------------------------------------------------------------------------------------------


def model_config(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        moe_intermediate_size=settings.expert_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=settings.head_dim,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=tokenizer.model_max_length,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        router_aux_loss_coef=0.01,
        experts_implementation="grouped_mm",
    )


def cold_start(
    model: Qwen3MoeForCausalLM,
    stages: Sequence[tuple[int, Data]],
    probes: Sequence[Data],
    settings: Settings,
    log: Log,
) -> int:
    """Train the task with supervision on the model's turns, then scale its head to the target
    accuracy on the first probe; returns the number of steps.

    stages: (first step, data).
    The learning rate is constant until the skill appears (a sudden rise, at a different step for
    every seed), then falls to zero over `decay_steps`: a model from the middle of the rise is too
    unstable for RL to improve.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    decay_from: int | None = None
    for step in range(1, settings.max_steps + settings.decay_steps + 1):
        left = 1.0 if decay_from is None else 1.0 - (step - decay_from) / settings.decay_steps
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / 50, left)
        data = [content for first, content in stages if first < step][-1]
        chosen = torch.randint(len(data.tokens), (settings.batch_size,))
        loss = turn_loss(model, Data(*(part[chosen] for part in data)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if left <= 0.0:
            break
        if step % 10 and step != settings.max_steps:
            continue
        accuracies = [sampled_accuracy(model, probe) for probe in probes]
        accuracy = min(accuracies)
        if step % 50 == 0:
            shown = " ".join(f"{value:.3f}" for value in accuracies)
            log(f"  step {step:4d}  loss {loss.item():.3f}  accuracy of a sample {shown}")
        if decay_from is None and accuracy >= settings.skill:
            decay_from = step
        if decay_from is None and step == settings.max_steps:
            raise RuntimeError(
                f"accuracy {accuracy:.3f} after max_steps = {step} is below {settings.skill}:"
                f" {settings.task} not learnt; raise max_steps or use another seed"
            )
    temperature = soften(model, probes[0], settings.target_accuracy)
    log(
        f"  step {step:4d}  head divided by {temperature:.2f}, for a lower accuracy of samples at"
        " temperature 1"
    )
    return step


@torch.no_grad()
def soften(model: Qwen3MoeForCausalLM, probe: Data, target_accuracy: float) -> float:
    """Divide the output head by the temperature at which a sample is correct with probability
    `target_accuracy`, and return that temperature.
    """
    head = model.lm_head.weight.clone()
    low, high = 0.1, 100.0
    for _ in range(30):  # bisection: accuracy falls with temperature
        temperature = (low * high) ** 0.5
        model.lm_head.weight.copy_(head / temperature)
        if sampled_accuracy(model, probe) > target_accuracy:
            low = temperature
        else:
            high = temperature
    return temperature


def turn_loss(model: Qwen3MoeForCausalLM, data: Data) -> torch.Tensor:
    """Return the mean cross-entropy of the model's tokens, plus the router's load-balancing loss so
    that every expert is used.
    """
    output = model(input_ids=data.tokens, use_cache=False, output_router_logits=True)
    first = first_turn(data)
    targets = data.tokens.masked_fill(~data.is_models, -100)[:, first:]
    logits = output.logits[:, first - 1 : -1]
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return cross_entropy + model.config.router_aux_loss_coef * output.aux_loss


@torch.no_grad()
def sampled_accuracy(model: Qwen3MoeForCausalLM, data: Data) -> float:
    """Return the probability that samples at temperature 1 are exactly the turns: the mean over
    prompts of prod_t p(y_t | y_<t), t judged.
    """
    first = first_turn(data)
    logits = model(input_ids=data.tokens, use_cache=False).logits[:, first - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, data.tokens[:, first:].unsqueeze(-1)).squeeze(-1)
    return logprobs.masked_fill(~data.is_judged[:, first:], 0.0).sum(-1).exp().mean().item()


def first_turn(data: Data) -> int:
    """Return the first column that the model writes: logits before it are not needed."""
    return int(data.is_models.any(0).int().argmax())


@contextmanager
def deterministic_cpu(seed: int) -> Iterator[None]:
    """Use one seed and one thread, and restore the caller's torch state.

    Layers this small are not faster with a second thread, and ten times slower if another program
    uses its core.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# Files --------------------------------------------------------------------------------------------


def write_checkpoint(
    out: Path,
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    manifest: dict,
    train: Examples,
    heldout: Examples,
) -> None:
    out.mkdir(parents=True)
    disable_progress_bar()  # "Writing model shards": one small file needs none
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name, examples in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        rows = (
            json.dumps({"prompt": example.prompt, "label": example.label}) for example in examples
        )
        (out / name).write_text("\n".join(rows) + "\n")
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which a server of another user cannot read


def main() -> None:
    arguments = vars(parse_make_tiny_model())
    try:
        make_tiny_moe(arguments.pop("out"), **arguments)
    except (ValueError, FileExistsError, RuntimeError) as error:
        raise SystemExit(f"megatron-rl make-tiny-model: {error}") from error


if __name__ == "__main__":
    main()
