"""Every preset written out once more, response by response and token by token, as the papers print
it.

No line is shared with the package.  `x` is log pi with gradient; what a paper puts in sg[...] uses
`now`, its plain number.
"""

from math import exp, log

from tests.unit.loss.cases import keys_of


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


def binary_kl(p, q):
    """D(p || q) of the two outcomes "this token" and "another"."""
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def objective(name, xs, nows, olds, mus, a):
    """Sum over the tokens of one response of the objective to maximise (before any division by
    lengths).
    """
    n = len(nows)
    rho = [exp(o - m) for o, m in zip(olds, mus, strict=True)]
    product = exp(sum(log(v) for v in rho))
    tokens = list(zip(xs, nows, olds, mus, rho, strict=True))
    if name in ("minirl", "minirl_length_norm"):
        return sum(
            kept(now, old, a) * min(exp(now - mu), 5.0) * a * x for x, now, old, mu, _ in tokens
        )
    if name == "minirl_no_is":
        return sum(
            kept(now, old, a) * min(exp(now - old), 5.0) * a * x for x, now, old, _, _ in tokens
        )
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
    if name == "kpop":
        return sum(
            ppo(x, old, a)
            for x, _, old, mu, _ in tokens
            if binary_kl(exp(old), exp(mu)) <= 2.0 and binary_kl(exp(mu), exp(old)) <= 2.0
        )
    if name == "dis":
        ratios = [(exp(now - mu), x) for x, now, _, mu, _ in tokens]
        return sum((k if 0.8 < k < 1.28 else 0.0) * a * x for k, x in ratios)
    if name == "seq_mis":
        return (
            sum(product * ppo(x, old, a, high=1.28) for x, _, old, _, _ in tokens)
            if product <= 2.0
            else 0.0
        )
    if name == "geo_rs":
        keep = 0.999 <= product ** (1 / n) <= 1.001
        return sum(ppo(x, old, a, high=1.28) for x, _, old, _, _ in tokens) if keep else 0.0
    if name == "opsm":
        far = sum(mu - now for _, now, _, mu, _ in tokens) / n
        return 0.0 if a < 0 and far > 0.5 else sum(ppo(x, old, a) for x, _, old, _, _ in tokens)
    if name == "dppo":
        total = 0.0
        for x, now, _, mu, _ in tokens:
            k, divergence = exp(now - mu), abs(exp(now) - exp(mu))
            dropped = divergence > 0.15 and ((a > 0 and k > 1) or (a < 0 and k < 1))
            total = total + (0.0 if dropped else min(k, 20.0) * a * x)
        return total
    if name in NEWER:
        return NEWER[name](tokens, a)
    raise AssertionError(f"no formula for {name}")


def dppo_tau(tokens, a):
    total = 0.0
    for x, now, _, mu, _ in tokens:
        dropped = (a > 0 and exp(now) - exp(mu) > 0.2) or (a < 0 and exp(mu) - exp(now) > 0.2)
        total = total + (0.0 if dropped else exp(now - mu) * a * x) - 1e-3 * (x - mu) ** 2
    return total


def drpo(tokens, a):
    """Eq. 8 as printed: r A - |A| mu (r - 1)^2 / (2 delta)."""
    ratios = [((x - mu).exp(), exp(mu)) for x, _, _, mu, _ in tokens]
    return sum(r * a - abs(a) / (2 * 12.5) * mu * (r - 1) ** 2 for r, mu in ratios)


def vaco(tokens, a):
    """The tokens that would move further away are dropped where the response's mean of |rho - 1|
    exceeds 0.2.
    """
    far = sum(abs(v - 1) for *_, v in tokens) / len(tokens) > 0.2
    return sum(
        0.0 if far and a * (v - 1) > 0 else min(v, 2.0) * ppo(x, old, a, high=1.28)
        for x, _, old, _, v in tokens
    )


def sapo(tokens, a):
    tau = 1.0 if a > 0 else 1.05
    return sum(
        4 / tau / (1 + (-tau * ((x - old).exp() - 1)).exp()) * a for x, _, old, _, _ in tokens
    )


def gmpo(tokens, a):
    """The geometric mean of min(r^sgn, clip(r^sgn, e^-0.4, e^0.4))^sgn, sgn the sign of A; once per
    response.
    """
    sign = 1 if a > 0 else -1
    logs = [min(sign * (x - old), clip(sign * (x - old), -0.4, 0.4)) for x, _, old, _, _ in tokens]
    return len(tokens) * (sign * sum(logs) / len(tokens)).exp() * a if a else 0.0


def rspo(tokens, a):
    """GMPO of r gamma, gamma = max(exp(-shift), 0.8) a plain number; held tokens at the bound
    itself.
    """
    sign, total = (1 if a > 0 else -1), 0.0
    for x, _, old, mu, _ in tokens:
        d = x - old + max(-abs(old - mu) / 2, log(0.8))
        total = total + min(sign * d, clip(sign * d, -0.4, 0.4))
    return len(tokens) * (sign * total / len(tokens)).exp() * a if a else 0.0


def policy_gradient(tokens, a):
    return sum(a * x for x, *_ in tokens)


def chosen(name, batch):
    """Clip-Cov and KL-Cov: {(response, token)} by sorting the covariances of log pi_old and A; ties
    and draws by `keys_of`.
    """
    tokens = [(i, t, r.advantage, o, k) for i, r in enumerate(batch) for t, (o, k) in enumerate(
        zip(r.old.tolist(), keys_of(r.mu).tolist(), strict=True))]  # fmt: skip
    mean_a, mean_o = (sum(token[at] for token in tokens) / len(tokens) for at in (2, 3))
    covs = [((a - mean_a) * (o - mean_o), k, (i, t)) for i, t, a, o, k in tokens]
    if name == "clip_cov":
        band = sorted((k, where) for cov, k, where in covs if 1.0 < cov < 5.0)
        return {where for _, where in band[: max(int(2e-4 * len(tokens)), 1)]}
    top = sorted(covs, key=lambda found: (-found[0], found[1]))
    return {where for *_, where in top[: max(int(2e-3 * len(tokens)), 1)]}


def selecting(name, tokens, a, marks):
    """Clip-Cov drops what it chose, of a PPO clip at 2; KL-Cov adds |log r| there, beyond 0.01, and
    clips nothing.
    """
    if name == "clip_cov":
        return sum(
            0.0 if mark else ppo(x, old, a, low=0.0, high=2.0)
            for (x, _, old, *_), mark in zip(tokens, marks, strict=True)
        )
    return sum(
        a * (x - old).exp() - (abs(x - old) if mark and abs(now - old) > 0.01 else 0.0)
        for (x, now, old, *_), mark in zip(tokens, marks, strict=True)
    )


NEWER = {
    "dppo_tau": dppo_tau, "drpo": drpo, "vaco": vaco, "sapo": sapo, "gmpo": gmpo, "rspo": rspo,
    "gpg": policy_gradient,
    "opo": policy_gradient,
}  # fmt: skip


LENGTH_MEAN = ("minirl_length_norm", "grpo", "kpop", "gspo", "opsm", "sapo", "gmpo", "rspo")
TOKEN_MEAN = (
    "reinforce_pp",
    "dapo",
    "cispo",
    "dis",
    "tis",
    "seq_mis",
    "geo_rs",
    "dppo_tau",
    "vaco",
    "gpg",
    "clip_cov",
    "kl_cov",
)


def loss(name, batch):
    """The mini-batch loss of float64 sequences; differentiable in every sequence's log-probs.

    Sequences of one episode are one response: they count once in N, and together in its length and
    in what icepop keeps.
    """
    total = 0.0
    num_tokens = sum(len(r.logprobs) for r in batch)
    episodes = [id(r) if r.episode is None else ("episode", r.episode) for r in batch]
    num_responses = len(set(episodes))
    for i, r in enumerate(batch):
        if len(r.logprobs) == 0:
            continue
        siblings = [s for s, episode in zip(batch, episodes, strict=True) if episode == episodes[i]]
        xs, nows, olds, mus = list(r.logprobs), r.logprobs.tolist(), r.old.tolist(), r.mu.tolist()
        if name in ("clip_cov", "kl_cov"):
            marks = [(i, t) in chosen(name, batch) for t in range(len(xs))]
            value = selecting(name, list(zip(xs, nows, olds, strict=True)), r.advantage, marks)
        else:
            value = objective(name, xs, nows, olds, mus, r.advantage)
        if name in TOKEN_MEAN:
            value = value / num_tokens
        elif name in LENGTH_MEAN:
            value = value / sum(len(s.logprobs) for s in siblings) / num_responses
        elif name == "icepop":
            ratios = [
                exp(o - m)
                for s in siblings
                for o, m in zip(s.old.tolist(), s.mu.tolist(), strict=True)
            ]
            value = value / max(sum(0.5 <= ratio <= 5.0 for ratio in ratios), 1) / num_responses
        else:
            value = value / num_responses
        total = total - value
    return total
