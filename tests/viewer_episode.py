"""A made-up run with an episode of three sequences, in a chat format with tool calls: no model, no
server.

python -m tests.viewer_episode DIR        a run to look at
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models

from tests.viewer_run import EXPERTS, LAYERS, TOP_K, append, write_config

OPEN = ["<|im_start|>", "assistant\n"]
PROMPT = ["<|im_start|>", "user\n", "What is ", "2 * 3", " + 4?", "<|im_end|>", "\n", *OPEN]
CALL = [
    "I ask. ",
    "<tool_call>\n",
    '{"name": "calculate", "arguments": {"a": 2, "operator": "*", "b": 3}}',
    "\n</tool_call>",
    "<|im_end|>",
]
RESULT = [
    "\n", "<|im_start|>", "user\n", "<tool_response>\n", "6", "\n</tool_response>", "<|im_end|>",
    "\n", *OPEN,
]  # fmt: skip
ANSWER = ["So ", "<script>window.HACKED = 1</script>", " it is", " 11", "<|im_end|>"]
AGAIN = ["10", "<|im_end|>"]
CHECK = ["<|im_start|>", "system\n", "Check:", " 10", "<|im_end|>", "\n", *OPEN]
VERDICT = ["yes", "<|im_end|>"]
SEQUENCES = {
    # id: (prompt, turns with what the environment wrote between them, further fields)
    "Q0/0/0": (PROMPT, [CALL, RESULT, ANSWER], {
        "turn_rewards": [0.0, 0.25], "turn_ends": ["stop", "stop"],
        "turn_seconds": [[0.0125, 1.5], [0.5, 2.25]],
    }),
    "Q0/0/1": ([*PROMPT, *CALL, *RESULT], [AGAIN], {"turn_seconds": [[0.1, 0.75]]}),
    "Q0/0": (CHECK, [VERDICT], {"turn_ends": ["stop"]}),
    "Q0/1": (PROMPT, [AGAIN], {}),
}  # fmt: skip


def write_agent_run(folder: Path, *, tensors: bool = True) -> Path:
    """Write the run of one step and return its folder."""
    folder.mkdir(parents=True)
    write_config(folder, 1)
    texts = [text for prompt, turns, _ in SEQUENCES.values() for part in (prompt, *turns)
             for text in part]  # fmt: skip
    ids = {text: token for token, text in enumerate(dict.fromkeys(["?", *texts]))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
    tokenizer.add_special_tokens([AddedToken(text) for text in ids if text.startswith("<|")])
    (folder / "hf").mkdir()
    tokenizer.save(str(folder / "hf/tokenizer.json"))
    lines, arrays = [], {}
    for name, (prompt, turns, fields) in SEQUENCES.items():
        parts = [prompt, *turns]
        tokens = np.array([ids[text] for part in parts for text in part])
        ends = np.cumsum([len(part) for part in parts]).tolist()
        environment = [(ends[n - 1], ends[n]) for n in range(2, len(parts), 2)]
        observed = sum(end - start for start, end in environment)
        sampled = len(tokens) - len(prompt) - observed
        kinds = {"tokens": tokens, "logprobs": np.full(sampled, -0.5, np.float32)}
        rng = np.random.default_rng(len(tokens))
        experts = np.argsort(rng.random((len(tokens) - 1, LAYERS, EXPERTS)), -1)[..., :TOP_K]
        kinds["routed_experts"] = experts.astype(np.uint8)
        if environment:
            kinds["environment"] = np.array(environment)
        arrays |= {f"{name}:{kind}": array for kind, array in kinds.items()}
        lines.append({
            "step": 1, "id": name, "prompt_id": "Q0", "prompt": "What is 2 * 3 + 4?",
            "label": "10", "response": "".join(text for part in turns for text in part),
            "reward": 1.0, "advantage": 0.5, "prompt_length": len(prompt),
            "response_length": sampled, "finish_reason": "stop", "policy_versions": [[0, sampled]],
            "environment_length": observed, "num_turns": 1 + len(environment),
            "episode": "Q0/0" if name.startswith("Q0/0/") else "", **fields,
        })  # fmt: skip
    append(folder / "rollouts.jsonl", lines)
    if tensors:
        save_file(arrays, folder / "rollouts_000001.safetensors", metadata={"schema": "1"})
    return folder


if __name__ == "__main__":
    print(write_agent_run(Path(sys.argv[1])))
