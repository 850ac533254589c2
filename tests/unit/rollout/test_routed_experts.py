"""Decoding is exact on honest payloads and refuses every malformed one that structure can show."""

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.client import routed_experts
from megatron_rl.rollout.client.routed_experts import RoutedExpertsError, decode_routed_experts

ROWS, LAYERS, K, EXPERTS = 40, 6, 4, 32


def honest(rows=ROWS, layers=LAYERS, top_k=K, experts=EXPERTS, seed=0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, layers, experts))
    return scores.argsort(-1)[..., :top_k].astype("<i4")


def encode(ids: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()


def decode_all(payload, rows=ROWS, layers=LAYERS, top_k=K, experts=EXPERTS, moe_layers=None):
    return decode_routed_experts(
        payload,
        num_rows=rows,
        num_layers=layers,
        moe_layers=range(layers) if moe_layers is None else moe_layers,
        top_k=top_k,
        num_experts=experts,
    )


def decode(payload, *args, **kwargs) -> np.ndarray:
    ids, missing = decode_all(payload, *args, **kwargs)
    assert missing is None
    return ids


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 30),
    layers=st.integers(1, 5),
    top_k=st.integers(1, 5),
    experts=st.sampled_from([5, 128, 256, 257, 512]),
    block_bytes=st.sampled_from([1, 100, 1000, 10**6]),
    seed=st.integers(0, 10**6),
    as_bytes=st.booleans(),
)
def test_decodes_exactly_whatever_the_shape_and_block_size(
    rows, layers, top_k, experts, block_bytes, seed, as_bytes
):
    ids = honest(rows, layers, top_k, experts, seed)
    payload = encode(ids).encode() if as_bytes else encode(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
        decoded = decode(payload, rows, layers, top_k, experts)
    assert decoded.dtype == (np.uint8 if experts <= 256 else np.int16)
    assert decoded.shape == ids.shape and (decoded == ids).all()


@pytest.mark.parametrize("experts", [32, 512])
@pytest.mark.parametrize("top_k", range(1, 18))
def test_rows_of_any_number_of_bytes_are_moved_whole(top_k, experts):
    """Of 1, 2, 4 and 8 bytes as integers."""
    ids = honest(top_k=top_k, experts=experts)
    assert (decode(encode(ids), top_k=top_k, experts=experts) == ids).all()


def test_dense_layers_are_left_out_and_may_hold_anything():
    ids = honest()
    ids[:, 0] = 0
    ids[:, 3] = 10**9
    assert (decode(encode(ids), moe_layers=[1, 2, 4, 5]) == ids[:, [1, 2, 4, 5]]).all()


def edited(edit) -> str:
    return encode(edit(honest()))


def set_at(index, value):
    def edit(ids):
        ids = ids.copy()
        ids[index] = value
        return ids

    return edit


def copy_column(ids):
    ids = ids.copy()
    ids[17, 2, 3] = ids[17, 2, 0]
    return ids


def transposed(*axes):
    """The payload's bytes of another axis order."""
    return lambda ids: np.ascontiguousarray(ids.transpose(axes)).reshape(ids.shape)


def two_layers_as_one(ids):
    """A server with half the layers and twice the top-k: equally many bytes, each row holds K ids
    of another layer's row.
    """
    return honest(layers=LAYERS // 2, top_k=2 * K, seed=1).reshape(ids.shape)


MALFORMED = {  # every class of a fuzz of peers' decoders that structure can show: reason, payload
    "id = E": ("out_of_range", edited(set_at((5, 1, 2), EXPERTS))),
    "id 999": ("out_of_range", edited(set_at((5, 1, 2), 999))),
    "id -1": ("out_of_range", edited(set_at((39, 5, 3), -1))),
    "row of -1 in one layer": ("out_of_range", edited(set_at((39, 5), -1))),
    "row of -1 but for one layer": ("out_of_range", edited(set_at((39, slice(1, None)), -1))),
    "row of -1 and 0 by layer": (
        "out_of_range",
        edited(lambda ids: set_at((7, 0), 0)(set_at((7, slice(1, None)), -1)(ids))),
    ),
    "id that wraps to a legal int16": ("out_of_range", edited(set_at((5, 1, 2), 65539))),
    "id that wraps to a legal uint8": ("out_of_range", edited(set_at((5, 1, 2), 259))),
    "smallest int32": ("out_of_range", edited(set_at((0, 0, 0), -(2**31)))),
    "duplicate": ("duplicate", edited(copy_column)),
    "duplicate at the start": (
        "duplicate",
        edited(lambda ids: set_at((0, 0, 1), ids[0, 0, 0])(ids)),
    ),
    "all-equal row": ("duplicate", edited(set_at((7, 4), 3))),
    "all-equal row in every layer": ("duplicate", edited(set_at(7, 3))),
    "zero row in one layer": ("duplicate", edited(set_at((7, 4), 0))),
    "zero row but for one layer": ("duplicate", edited(set_at((7, slice(1, None)), 0))),
    "zero layer": ("duplicate", edited(set_at((slice(None), 2), 0))),
    "zero tail of some layers": ("duplicate", edited(set_at((slice(30, None), slice(3, None)), 0))),
    "everything zero": ("never_written", edited(np.zeros_like)),
    "everything -1": ("never_written", edited(lambda ids: np.full_like(ids, -1))),
    "layer and top-k axes swapped": ("duplicate", edited(transposed(0, 2, 1))),
    "row and top-k axes swapped": ("duplicate", edited(transposed(2, 1, 0))),
    "a row short": ("wrong_size", edited(lambda ids: ids[:-1])),
    "the first row dropped": ("wrong_size", edited(lambda ids: ids[1:])),
    "the prompt's rows dropped": ("wrong_size", edited(lambda ids: ids[12:])),
    "a row long": ("wrong_size", edited(lambda ids: np.concatenate([ids, ids[:1]]))),
    "half the layers": ("wrong_size", edited(lambda ids: ids[:, :3])),
    "another top-k": ("wrong_size", edited(lambda ids: ids[..., :3])),
    "int64": ("wrong_size", edited(lambda ids: ids.astype("<i8"))),
    "int16": ("wrong_size", edited(lambda ids: ids.astype("<i2"))),
    "uint8": ("wrong_size", edited(lambda ids: ids.astype("u1"))),
    "float32": ("out_of_range", edited(lambda ids: ids.astype("<f4"))),
    "big-endian": ("out_of_range", edited(lambda ids: ids.astype(">i4"))),
    "empty": ("wrong_size", ""),
    "truncated text": ("wrong_size", edited(lambda ids: ids)[:-8]),
    "a newline in the text": ("wrong_size", edited(lambda ids: ids) + "\n"),
    "a space for a character": ("not_base64", " " + edited(lambda ids: ids)[1:]),
    "url-safe alphabet": ("not_base64", "-_" + edited(lambda ids: ids)[2:]),
    "padding in the middle": ("not_base64", "AA==" + edited(lambda ids: ids)[4:]),
    "not ASCII": ("not_base64", "\u00e9" + edited(lambda ids: ids)[1:]),
    "text": ("wrong_size", "not base64!"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("block_bytes", [1, 10**6])
def test_malformed_payloads_are_refused(case, block_bytes, monkeypatch):
    monkeypatch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
    reason, payload = MALFORMED[case]
    with pytest.raises(RoutedExpertsError) as caught:
        decode(payload)
    assert caught.value.reason == reason


INVISIBLE = {  # every row is a legal route: no structure tells.  Found by -
    # check_rollouts: alignment, canary; routing/router_mismatch
    "shift by one token": lambda ids: np.roll(ids, 1, 0),
    "layers reversed": lambda ids: ids[:, ::-1],  # the canary (names the layers), routing/flip_rate
    "two layers swapped": lambda ids: ids[:, [0, 2, 1, 3, 4, 5]],  # the canary, routing/flip_rate
    "row and layer axes swapped": transposed(1, 0, 2),  # the canary, routing/router_mismatch
    # server_info's sizes; check_rollouts: shape, canary
    "half the layers, twice the top-k": two_layers_as_one,
    "another request's payload": lambda ids: honest(
        seed=1
    ),  # the canary, routing/router_mismatch; once decoded: the digest
}


@pytest.mark.parametrize("case", INVISIBLE)
def test_valid_but_wrong_ids_are_decoded_as_sent(case):
    """The decoder does not find these: docs/concepts/routing_replay.md says what does."""
    sent = INVISIBLE[case](honest())
    assert (decode(encode(sent)) == sent).all()


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.sampled_from([-1, 0])),
        max_size=ROWS,
        unique_by=lambda x: x[0],
    ),
    block_bytes=st.sampled_from([1, 1000, 10**6]),
    dense=st.booleans(),
)
def test_missing_rows_are_found_and_reported_only_by_the_mask(gaps, block_bytes, dense):
    ids = honest()
    moe_layers = [1, 3, 4, 5] if dense else list(range(LAYERS))
    for row, value in gaps[: ROWS - 1]:
        ids[row, moe_layers] = value  # dense layers keep what they hold
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed_experts, "BLOCK_BYTES", block_bytes)
        decoded, missing = decode_all(encode(ids), moe_layers=moe_layers)
    expected = sorted(row for row, _ in gaps[: ROWS - 1])
    assert (missing is None) == (not expected)
    assert expected == ([] if missing is None else np.flatnonzero(missing).tolist())
    present = np.setdiff1d(np.arange(ROWS), expected)
    assert (decoded[present] == ids[present][:, moe_layers]).all() and not decoded[expected].any()


@pytest.mark.parametrize("value", [EXPERTS, -1])
def test_a_missing_row_does_not_hide_another_rows_error(value):
    ids = honest()
    ids[4] = -1
    ids[9] = 0
    ids[20, 3, 2] = value
    with pytest.raises(RoutedExpertsError) as caught:
        decode(encode(ids))
    assert (caught.value.reason, caught.value.layer, caught.value.row) == ("out_of_range", 3, 20)
    ids[20, 3, 2] = ids[20, 3, 1]
    with pytest.raises(RoutedExpertsError) as caught:
        decode(encode(ids))
    assert (caught.value.reason, caught.value.layer, caught.value.row) == ("duplicate", 3, 20)


def test_with_one_expert_per_token_zero_is_expert_zero():
    ids = honest(top_k=1)
    ids[3] = 0
    assert (decode(encode(ids), top_k=1) == ids).all()
    ids[5] = -1
    decoded, missing = decode_all(encode(ids), top_k=1)
    assert np.flatnonzero(missing).tolist() == [5] and (decoded[3] == 0).all()


def test_above_256_experts_ids_take_16_bits():
    """300 and 44 are the same in 8 bits."""
    ids = honest(experts=512)
    ids[0, 0] = [300, 44, 511, 256]
    decoded = decode(encode(ids), experts=512)
    assert decoded.dtype == np.int16 and decoded[0, 0].tolist() == [300, 44, 511, 256]
    with pytest.raises(RoutedExpertsError, match="row 0: 300; rule: 0 <= id < 256"):
        decode(encode(ids), experts=256)


def test_a_model_may_have_one_moe_layer():
    ids = honest(layers=1)
    assert (decode(encode(ids), layers=1) == ids).all()
    assert (decode(encode(honest()), moe_layers=[4]) == honest()[:, [4]]).all()


def test_an_error_without_a_place_names_none():
    with pytest.raises(
        RoutedExpertsError, match="^routed_experts: wrong_size; rule: 3840 bytes are 5120 base64"
    ):
        decode("")


def test_an_error_names_layer_row_and_value(monkeypatch):
    monkeypatch.setattr(routed_experts, "BLOCK_BYTES", 1000)
    with pytest.raises(RoutedExpertsError) as caught:
        decode(MALFORMED["id 999"][1], moe_layers=[1, 4])
    assert (caught.value.layer, caught.value.row, caught.value.value) == (1, 5, 999)
    assert "0 <= id < 32" in str(caught.value)
    with pytest.raises(RoutedExpertsError) as caught:
        decode(MALFORMED["duplicate"][1])
    assert (caught.value.layer, caught.value.row) == (2, 17)
    assert caught.value.value == honest()[17, 2, 0]
    rule = "the K experts of a token are distinct; all zero here but not in the row's other layers"
    with pytest.raises(
        RoutedExpertsError,
        match=f"layer 2, row 0: 0; rule: {rule}: the server never wrote this one",
    ):
        decode(MALFORMED["zero layer"][1])
    with pytest.raises(RoutedExpertsError, match="at layer 1, row 5: 32; rule: 0 <= id < 32$"):
        decode(MALFORMED["id = E"][1])
    with pytest.raises(
        RoutedExpertsError, match="layer 4, row 7: 5; rule: the K experts of a token are distinct$"
    ):
        decode(edited(set_at((7, 4), [0, 5, 5, 1])))


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(0, ROWS * LAYERS * K * 4 * 4 // 3 - 1),
    character=st.characters(codec="latin-1"),
)
def test_one_changed_character_never_silently_gives_an_invalid_id(position, character):
    """Whatever one character becomes, the result is refused or is in range, distinct and what
    strict decoding says.
    """
    text = encode(honest())
    changed = text[:position] + character + text[position + 1 :]
    try:
        ids, missing = decode_all(changed)
    except RoutedExpertsError:
        return
    assert missing is None  # a whole row never turns into -1 by one character
    reference = np.frombuffer(base64.b64decode(changed, validate=True), "<i4").reshape(ids.shape)
    assert (ids == reference).all() and reference.min() >= 0 and reference.max() < EXPERTS
    assert (np.diff(np.sort(ids, axis=-1).astype(int), axis=-1) > 0).all()


@pytest.mark.parametrize("experts", [256, 200, 7])
def test_every_character_at_every_position(experts):
    """A block is accepted if and only if strict base64 decoding gives ids below `experts`: all 32
    places x 256 bytes.
    """
    rng = np.random.default_rng(experts)
    accepted = 0
    for at in range(32):
        text = bytearray(base64.b64encode(rng.integers(0, experts, 6).astype("<i4").tobytes()))
        for character in range(256):
            text[at] = character
            try:
                ids = np.frombuffer(base64.b64decode(bytes(text), validate=True), "<i4")
            except ValueError:
                ids = np.full(6, -1)
            is_clean = len(ids) == 6 and ids.min() >= 0 and ids.max() < experts
            try:
                found, missing = decode_all(bytes(text), rows=6, layers=1, top_k=1, experts=experts)
            except RoutedExpertsError:
                found, missing = None, None
            # -1 marks a row without a route
            has_gap = len(ids) == 6 and not is_clean and missing is not None
            assert (found is not None) == (is_clean or has_gap), (at, character)
            assert not is_clean or (found[:, 0, 0] == ids).all()
            accepted += is_clean
    assert accepted > 32
