"""Every preset written out once more, response by response and token by token, as the papers print it.

No line is shared with the package.  `x` is log pi with gradient; what a paper puts in sg[...] uses `now`, its plain number.
"""

from math import exp, log


def clip(value, low, high):
    return min(max(value, low), high)


def ppo(x, old, a, low=0.8, high=1.2):
    """min(r A, clip(r) A) with the gradient that this expression has."""
    r = (x - old).exp()
    return min(r * a, clip(r, low, high) * a)


def kept(now, old, a, low=0.8, high=1.27):
    """M_t of Eq. 7."""
    r = exp(now - old)
    return 0.0 if (a > 0 and r > high) or (a < 0 and r < low) else 1.0


def objective(name, xs, nows, olds, mus, a):
    """Sum over the tokens of one response of the objective to maximise (before any division by lengths)."""
    n = len(nows)
    rho = [exp(o - m) for o, m in zip(olds, mus, strict=True)]
    product = exp(sum(log(v) for v in rho))
    tokens = list(zip(xs, nows, olds, mus, rho, strict=True))
    if name in ("minirl", "minirl_length_norm"):
        return sum(kept(now, old, a) * min(exp(now - mu), 5.0) * a * x for x, now, old, mu, _ in tokens)
    if name == "minirl_no_is":
        return sum(kept(now, old, a) * min(exp(now - old), 5.0) * a * x for x, now, old, _, _ in tokens)
    if name == "minirl_no_clip":
        return sum(min(exp(now - mu), 5.0) * a * x for x, now, _, mu, _ in tokens)
    if name in ("reinforce", "rloo"):
        return sum(a * x for x, *_ in tokens)
    if name in ("reinforce_pp", "grpo", "dr_grpo"):
        return sum(ppo(x, old, a) for x, _, old, _, _ in tokens)
    if name == "dapo":
        return sum(ppo(x, old, a, high=1.28) for x, _, old, _, _ in tokens)
    if name == "gspo":
        s = (sum(x - old for x, _, old, _, _ in tokens) / n).exp()
        return n * min(s * a, clip(s, 1 - 3e-4, 1 + 4e-4) * a)
    if name == "cispo":
        return sum(clip(exp(now - old), 0.8, 1.27) * a * x for x, now, old, _, _ in tokens)
    if name == "decoupled_ppo":
        return sum(v * ppo(x, old, a) for x, _, old, _, v in tokens)
    if name == "tis":
        return sum(min(v, 2.0) * ppo(x, old, a, high=1.28) for x, _, old, _, v in tokens)
    if name == "icepop":
        return sum(v * ppo(x, old, a) for x, _, old, _, v in tokens if 0.5 <= v <= 5.0)
    if name == "seq_mis":
        return sum(product * ppo(x, old, a, high=1.28) for x, _, old, _, _ in tokens) if product <= 2.0 else 0.0
    if name == "geo_rs":
        keep = 0.999 <= product ** (1 / n) <= 1.001
        return sum(ppo(x, old, a, high=1.28) for x, _, old, _, _ in tokens) if keep else 0.0
    if name == "opsm":
        stale = sum(old - now for _, now, old, _, _ in tokens) / n
        return 0.0 if a < 0 and stale > -log(0.9999) else sum(ppo(x, old, a) for x, _, old, _, _ in tokens)
    if name == "dppo":
        total = 0.0
        for x, now, _, mu, _ in tokens:
            k, divergence = exp(now - mu), abs(exp(now) - exp(mu))
            dropped = divergence > 0.15 and ((a > 0 and k > 1) or (a < 0 and k < 1))
            total = total + (0.0 if dropped else min(k, 5.0) * a * x)
        return total
    raise AssertionError(f"no formula for {name}")


LENGTH_MEAN = ("minirl_length_norm", "grpo", "gspo", "opsm")
TOKEN_MEAN = ("reinforce_pp", "dapo", "cispo", "tis", "seq_mis", "geo_rs")


def loss(name, batch):
    """The mini-batch loss of float64 responses; differentiable in every response's log-probs."""
    total = 0.0
    num_tokens = sum(len(r.logprobs) for r in batch)
    for r in batch:
        if len(r.logprobs) == 0:
            continue
        xs, nows, olds, mus = list(r.logprobs), r.logprobs.tolist(), r.old.tolist(), r.mu.tolist()
        value = objective(name, xs, nows, olds, mus, r.advantage)
        if name in TOKEN_MEAN:
            value = value / num_tokens
        elif name in LENGTH_MEAN:
            value = value / len(xs) / len(batch)
        elif name == "icepop":
            inside = sum(0.5 <= exp(o - m) <= 5.0 for o, m in zip(olds, mus, strict=True))
            value = value / max(inside, 1) / len(batch)
        else:
            value = value / len(batch)
        total = total - value
    return total
