"""Checks that an engine computes what transformers computes with the same weights.

They need the model's directory; without it, nothing shows that an engine serves the weights that it was sent: one with
a zeroed, transposed or stale tensor answers, updates and reports as a correct one does. If log-probs differ, the kit
looks for the cause: it first tries weights and log-probs of common faults on the reference, then sends updates in which
only some tensors change, and halves them until it has those that do not follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inference_contract.conformance.chat_checks import check_columns
from inference_contract.conformance.session import NotOffered, Session, checks_of, succeeded
from inference_contract.conformance.weight_checks import kit_trainer, updates_under_load
from inference_contract.schemas import ChatCompletion
from inference_contract.weights import DType, OnUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from inference_contract.conformance.reference import Difference, Reference, Rows, Weights

_TOKENS: Final = 24
#: Standard deviations by which samples may be more or less surprising than their distribution.
_SURPRISE: Final = 5.0
#: The most tensors that a report names, and the longest search for them on the reference, in seconds.
_NAMED: Final = 6
_SEARCH_S: Final = 60.0
#: A small factor is found by comparing the differences with the effect of a factor of 1 + `_STEP`; this share of their
#: squares may remain.
_SCALED: Final = "is multiplied by about"
_STEP: Final = 0.01
_UNEXPLAINED: Final = 0.2
#: The most rows of an update in flight that are compared, and the fewest.
_CROSSING: Final = (8, 3)
#: The most samples, and the most tokens of all, with which the kit tries to fill a cache.
_FILLING: Final = (64, 2**16)

#: Conversations whose rendering is compared with the directory's own.
_CONVERSATIONS: Final = (
    [{"role": "user", "content": "1 + 2 = "}],
    [{"role": "user", "content": "spell this word: tree\n\n  two spaces"}],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "and now, in 3 words?"},
    ],
    [{"role": "system", "content": "be short."}, {"role": "user", "content": "hello"}],
)


def reference_of(session: Session) -> Reference:
    """Return the reference of this session. Raises `NotOffered` without a model directory that transformers loads."""
    if session.expected is None:
        raise NotOffered(
            "no model directory was given, so nothing shows that the engine computes with the weights that it has: one "
            "with a stale, zeroed or transposed tensor passes all other checks; give --model"
        )
    if session.reference is None:
        try:
            from inference_contract.conformance.reference import PRECISIONS, Reference
        except ImportError as error:
            raise NotOffered(f"the reference needs {error.name}; install it") from error
        dtypes = [row.dtype.value for row in session.card().layout.parameters]
        precision = session.expected.precision or max(set(dtypes), key=dtypes.count)
        if precision not in PRECISIONS:
            raise NotOffered(f"the reference computes in {', '.join(PRECISIONS)}, the engine in {precision}")
        try:
            session.reference = Reference(session.expected.model, precision)
        except ValueError as error:
            raise NotOffered(str(error)) from error
    reference: Reference = session.reference
    return reference


def answers(session: Session, version: int, *, samples: int = 4, seed: int = 17) -> list[Rows]:
    """Return sampled and greedy answers of `version` to two known prompts, one of which nearly fills the context."""
    from inference_contract.conformance.reference import Rows

    assert session.expected is not None
    rows = []
    for prompt in _prompts(session):
        for temperature in sorted({0.0, session.expected.temperature, 1.5}):
            answer = session.chat(
                prompt_token_ids=prompt,
                n=samples if temperature else 1,
                max_tokens=_TOKENS,
                temperature=temperature,
                ignore_eos=True,
                seed=seed,
            )
            for choice in answer.choices:
                check_columns(choice, versions={version})
            rows.append(Rows.of(answer, temperature))
    return rows


def _prompts(session: Session) -> list[list[int]]:
    """Return two prompts of arbitrary tokens: longer than a block of a paged cache, and as long as a context allows."""
    vocabulary = reference_of(session).vocabulary
    longest = max(1, min(session.card().context_length - _TOKENS, 1024))
    return [[(7 * i * i + 13 * i + 5) % vocabulary for i in range(length)] for length in (min(37, longest), longest)]


# --- the weights of the engine's start ---------------------------------------------------------------------------


def loaded_weights_compute_as_the_directory(session: Session) -> str | None:
    """Before any update, log-probs are those that transformers computes with the directory's weights."""
    reference = reference_of(session)
    if session.card().digest is not None:
        raise NotOffered("the engine has been updated since it started, so it no longer serves the directory's weights")
    reference.take(reference.directory)
    rows = answers(session, session.card().model_version)
    found = reference.difference(rows)
    assert found.is_allowed, f"{found}; {_cause(reference, rows, reference.directory, {}) or 'no cause was found'}"
    return str(found)


def layout_names_every_parameter(session: Session) -> str | None:
    """The layout names each parameter of the model once, with its shape; the rest of its state is reported."""
    reference, layout = reference_of(session), session.card().layout
    listed, model = {row.name: row.shape for row in layout.parameters}, reference.parameters
    missing, foreign = [*(model.keys() - listed.keys())], [*(listed.keys() - model.keys())]
    assert not missing, f"updates would not reach {missing[0]} and {len(missing) - 1} more: the layout must name them"
    assert not foreign, f"the model has no {foreign[0]}, which the layout names"
    for name, shape in listed.items():
        assert shape == tuple(model[name].shape), (
            f"{name} has shape {tuple(model[name].shape)}, the layout says {shape}"
        )
    notes = [f"{tied} follows {name}, with which it is tied" for tied, name in reference.tied.items()]
    if reference.buffers:
        named = ", ".join(sorted(reference.buffers)[:3])
        notes.append(f"updates carry no buffers: {len(reference.buffers)} keep the directory's values, such as {named}")
    return "; ".join(notes) or None


def prompts_are_those_of_the_directory(session: Session) -> str | None:
    """Conversations are rendered by the directory's tokenizer and chat template, without a system prompt of its own."""
    reference = reference_of(session)
    compared = 0
    for messages in _CONVERSATIONS:
        try:
            expected = reference.rendered(messages)
        except ValueError:
            continue  # the template has no such role
        response = session.completed(messages=messages, max_tokens=1)
        got = ChatCompletion.model_validate(succeeded(response)).prompt_token_ids or []
        assert got == expected, (
            f"the prompt of {messages} must be the directory's: {reference.first_other(expected, got)}"
        )
        compared += 1
    if not compared:
        raise NotOffered("the directory's tokenizer has no chat template")
    return f"{compared} conversations"


LOADED_CHECKS = checks_of(globals())

# --- updates -----------------------------------------------------------------------------------------------------


def update_reaches_every_tensor(session: Session) -> str | None:
    """After an update that changes every tensor, log-probs are transformers' with the weights sent, and none older."""
    reference = reference_of(session)
    before, due = _two_versions(session, reference)
    found = _published(session, reference, before)
    assert found.is_allowed, f"after an update to the directory's weights {found}; {_culprit(session, before, {})}"
    found = _published(session, reference, due)
    assert found.is_allowed, f"{found}; {_culprit(session, due, before)}"
    return str(found)


def samples_follow_the_distribution(session: Session) -> str | None:
    """Tokens are drawn from the whole distribution at the request's temperature; greedy ones are the likeliest."""
    reference = reference_of(session)
    import torch

    _, due = _two_versions(session, reference)
    version = publish(session, due)
    reference.take(due)
    rows = [each for seed in range(4) for each in answers(session, version, samples=8, seed=seed)]
    excess, variance = torch.stack([reference.surprises(each) for each in rows if each.temperature]).sum(0)
    scores = (excess / variance.clamp_min(1.0).sqrt()).tolist()
    score = max(scores, key=abs)
    assert abs(score) < _SURPRISE, (
        f"sampled tokens are {score:+.1f} standard deviations from what their distribution lets expect: "
        + ("some tokens are drawn too rarely, as by top-p, top-k, min-p, a penalty or a lower temperature of the server"
           if score < 0 else "unlikely tokens are drawn too often, as by a higher temperature of the server")
    )  # fmt: skip
    lost = max(reference.lost_by_greed(each) for each in rows if not each.temperature)
    assert lost < 0.5, f"a greedy token is {lost:.2g} nats less likely than the likeliest: a penalty or bias is applied"
    return f"{score:+.1f} standard deviations"


def update_in_flight_computes_with_both_versions(session: Session) -> str | None:
    """With on_update=continue, each token has the log-prob of the version its span names, over the cache so far."""
    return _in_flight(session, OnUpdate.CONTINUE)


def recompute_kv_leaves_no_old_cache(session: Session) -> str | None:
    """With on_update=recompute_kv, tokens of the new version have the log-probs of a new prefill by its weights."""
    return _in_flight(session, OnUpdate.RECOMPUTE_KV)


def _in_flight(session: Session, on_update: OnUpdate) -> str:
    reference = reference_of(session)
    before, due = _two_versions(session, reference)
    crossed = 0
    for rows, ends in _crossing(session, before, due, on_update):
        kept, recomputed = reference.across_update(rows, ends, before, due)
        is_kept = on_update is OnUpdate.CONTINUE
        expected = _over_evictions(rows.logprobs, kept, recomputed) if is_kept else recomputed
        found = reference.difference([rows], [expected])
        if not found.is_allowed:
            stale = not is_kept and reference.difference([rows], [kept]).is_allowed
            raise AssertionError(
                f"across an update with on_update={on_update} {found}"
                + ("; they are those over the old version's cache" if stale else "")
            )
        crossed += len(ends)
        if crossed >= _CROSSING[1]:
            return f"{crossed} answers across updates; {found}"
    raise NotOffered("no sample was in flight while new weights were committed; try a longer timeout")


def _over_evictions(logprobs: Tensor, kept: Tensor, recomputed: Tensor) -> Tensor:
    """Return the log-probs [n, T] that the engine's should be, if it may evict a row and compute it again.

    An eviction at token p, of which no answer tells, leaves `kept` before p and `recomputed` from there on, all of the
    row if it came before the update. Each row takes the p that leaves the least difference.
    """
    import torch

    before, after = ((logprobs - each).abs().cumsum(1) for each in (kept, recomputed))
    nothing = before.new_zeros(len(before), 1)
    lost = torch.cat([nothing, before], 1) + after[:, -1:] - torch.cat([nothing, after], 1)
    evicted = lost.argmin(1, keepdim=True)
    return kept.where(torch.arange(kept.shape[1]) < evicted, recomputed)


def cache_equals_a_new_prefill(session: Session) -> str | None:
    """An answer's rest is the same if the engine computes its beginning again, after an update to the same weights."""
    trainer = kit_trainer(session)
    data = trainer.weights(41)
    trainer.publish(data)
    context = session.card().context_length
    sampled = session.chat(temperature=0.0, max_tokens=min(_TOKENS, context // 2), ignore_eos=True)
    prompt, choice = sampled.prompt_token_ids or [], sampled.choices[0]
    tokens, logprobs = choice.token_ids or [], choice.token_logprobs or []
    precision = session.expected.precision if session.expected else None
    dtypes = {row.dtype for row in session.card().layout.parameters}
    is_exact = precision in (None, "float32") and dtypes <= {DType.FLOAT32, DType.FLOAT64}
    compared, tolerance = 0, 1e-3 if is_exact else 0.5
    for end in range(1, len(tokens), 5):
        trainer.publish(data)  # a cache of prefixes must not outlive an update, so each prefill is new
        rest = session.chat(
            prompt_token_ids=prompt + tokens[:end], temperature=0.0, max_tokens=len(tokens) - end, ignore_eos=True
        ).choices[0]
        for at, (token, logprob) in enumerate(zip(rest.token_ids or [], rest.token_logprobs or [], strict=True), end):
            off = abs(logprob - logprobs[at])
            if token != tokens[at] and off < 0.1:
                break  # two tokens are almost equally likely, and the rest follows another one
            assert token == tokens[at], (
                f"after {at} tokens a new prefill gives token {token}, the cache gave {tokens[at]}"
            )
            assert off < tolerance, (
                f"after {at} tokens a new prefill gives a log-prob that is {off:.2g} nats from the one over the cache"
            )
            compared += 1
    return f"{compared} tokens"


def preempted_samples_compute_as_others(session: Session) -> str | None:
    """Samples that a full cache interrupts have the log-probs of transformers after their cache is computed again."""
    from inference_contract.conformance.reference import Rows

    reference, before = reference_of(session), session.metric("preemptions_total")
    _, due = _two_versions(session, reference)
    publish(session, due)
    reference.take(due)
    (prompt, _), context = _prompts(session), session.card().context_length
    most = min(context - len(prompt), _FILLING[1] // _FILLING[0])
    samples = min(int(session.metric("slots")), _FILLING[0])
    answer = session.chat(prompt_token_ids=prompt, n=samples, max_tokens=most, temperature=1.0, ignore_eos=True, seed=5)
    preempted = int(session.metric("preemptions_total") - before)
    if not preempted:
        raise NotOffered(f"{samples} samples of {most} tokens did not fill the cache, so no sample was preempted")
    found = reference.difference([Rows.of(answer, 1.0)])
    assert found.is_allowed, f"after {preempted} preemptions {found}"
    return f"{preempted} preemptions; {found}"


# --- steps -------------------------------------------------------------------------------------------------------


def _two_versions(session: Session, reference: Reference) -> tuple[Weights, Weights]:
    """Return the directory's weights, and weights of which every tensor differs, as the engine's layout holds them."""
    from inference_contract.conformance.reference import packed, perturbed, unpacked

    layout = session.card().layout
    start = unpacked(packed(reference.directory, layout), layout)
    return start, unpacked(packed(perturbed(start, 1), layout), layout)


def publish(session: Session, weights: Weights) -> int:
    """Update the engine to these weights; return their version."""
    from inference_contract.conformance.reference import packed

    trainer = kit_trainer(session)
    return trainer.publish(packed(weights, trainer.layout))


def _published(session: Session, reference: Reference, weights: Weights) -> Difference:
    """Update the engine to these weights and compare its log-probs with theirs."""
    version = publish(session, weights)
    reference.take(weights)
    return reference.difference(answers(session, version))


def _crossing(session: Session, before: Weights, due: Weights, on_update: OnUpdate) -> Iterator[tuple[Rows, list[int]]]:
    """Yield rows that were sampled across an update, and how many tokens of each the weights `before` sampled."""
    from inference_contract.conformance.reference import Rows, packed
    from inference_contract.conformance.trainer import digest

    trainer = kit_trainer(session)
    old, new = (packed(weights, trainer.layout) for weights in (before, due))
    short, _ = _prompts(session)
    context = session.card().context_length

    def ask(*, max_tokens: int, **fields: Any) -> Any:
        fields |= {"n": 4, "max_tokens": min(max_tokens, context - len(short)), "ignore_eos": True, "temperature": 1.0}
        return session.completed(prompt_token_ids=short, **fields)

    def prepare() -> tuple[int, int]:
        old_version, version = trainer.publish(old), trainer.next_version()
        trainer.accepted(trainer.update("prepare", version, on_update=on_update), "prepared")
        return old_version, version

    commit: dict[str, Any] = {"digest": digest(new), "on_update": on_update}
    for update in updates_under_load(session, ask, prepare, lambda _: trainer.broadcast(new), **commit):
        for response in update.answers:
            answer = ChatCompletion.model_validate(succeeded(response))
            crossing = [each for each in answer.choices if len(each.version_spans or ()) == 2][: _CROSSING[0]]
            if crossing:
                rows = Rows.of(answer.model_copy(update={"choices": crossing}), 1.0)
                yield rows, [(each.version_spans or [(0, 0)])[0][1] for each in crossing]


# --- the cause of a difference -----------------------------------------------------------------------------------


def _culprit(session: Session, due: Weights, before: Weights) -> str:
    """Describe why log-probs of the engine, which serves the update to `due`, are not those of these weights."""
    reference = reference_of(session)
    reference.take(due)
    rows = answers(session, session.card().model_version)
    if cause := _cause(reference, rows, due, before):
        return cause
    start, _ = _two_versions(session, reference)
    publish(session, start)
    if _published(session, reference, start).is_allowed:
        named = _halved(session, list(start), lambda names: _follow(session, reference, start, frozenset(names)))
        if named:
            return f"these tensors do not follow an update: {', '.join(named[:_NAMED])}"
        return "each tensor alone follows an update, but not all together"
    return _one_tensor(reference, rows, due, before) or "no cause was found: every update is wrong"


def _cause(reference: Reference, rows: list[Rows], due: Weights, before: Weights) -> str | None:
    """Name a fault of all weights, or of the log-probs, that explains the engine's answers."""
    import torch

    whole = {
        "the version before": before,
        "the model directory": reference.directory,
        "the update in bfloat16": {name: values.bfloat16().to(values.dtype) for name, values in due.items()},
    }
    for what, weights in whole.items():
        if weights:
            reference.take(weights)
            if reference.difference(rows).is_allowed:
                return f"they are those of the weights of {what}"
    reference.take(due)
    sampled = [each for each in rows if each.temperature]
    ours = [reference.logprobs(each) for each in sampled]
    trials = {
        "they are log-probs before the temperature": [
            reference.logprobs(replace(each, temperature=1.0)) for each in sampled
        ],
        "positions are off by one": [reference.logprobs(each, shift=1) for each in sampled],
        "each is that of the token before it": [own.roll(1, 1) for own in ours],
        "each is that of the next token": [own.roll(-1, 1) for own in ours],
    }
    for what, expected in trials.items():
        if reference.difference(sampled, expected).is_allowed:
            return what
    for coarser in ("bfloat16", "float16", "int8") if reference.precision == "float32" else ():
        if reference.difference(rows, [reference.logprobs(each, precision=coarser) for each in rows]).is_allowed:
            return f"they are those of {coarser} arithmetic"
    higher = torch.cat([(each.logprobs - own).flatten() for each, own in zip(sampled, ours, strict=True)])
    if float((higher > -1e-4).double().mean()) > 0.98:
        return "they are higher than the policy's, as after top-p, top-k or min-p"
    return None


def _follow(session: Session, reference: Reference, start: Weights, names: frozenset[str]) -> bool:
    """Return True if the engine computes with the new values of these tensors after an update of them alone."""
    from inference_contract.conformance.reference import perturbed

    publish(session, start)
    return _published(session, reference, perturbed(start, 3, names=names)).is_allowed


def _halved(session: Session, names: list[str], follow: Callable[[list[str]], bool]) -> list[str]:
    """Return up to `_NAMED` of the names that do not follow, by halving the lists of those that do not."""
    if follow(names):
        return []
    if len(names) == 1:
        return names
    half = len(names) // 2
    found = _halved(session, names[:half], follow)
    return found if len(found) >= _NAMED else found + _halved(session, names[half:], follow)


def _one_tensor(reference: Reference, rows: list[Rows], due: Weights, before: Weights) -> str | None:
    """Name the one fault of one or two tensors that explains the engine's answers, by trying all on the reference."""
    import torch

    deadline = time.monotonic() + _SEARCH_S
    reference.take(due)
    exact = [reference.logprobs(each) for each in rows]
    residual = torch.cat([(each.logprobs - own).flatten() for each, own in zip(rows, exact, strict=True)])
    for what, changed in _spoiled(due, before):
        reference.take(changed)
        explained = reference.difference(rows).is_allowed
        if what == _SCALED:
            effect = torch.cat([(reference.logprobs(e) - own).flatten() for e, own in zip(rows, exact, strict=True)])
            times = float(residual @ effect / effect.square().sum().clamp_min(1e-30))
            explained = float((residual - times * effect).square().sum() / residual.square().sum()) < _UNEXPLAINED
            what = f"{what} {1 + times * _STEP:.4g}"
        reference.take({name: due[name] for name in changed})
        if explained:
            return f"{' and '.join(changed)} {what}"
        if time.monotonic() > deadline:
            return None
    return None


def _spoiled(due: Weights, before: Weights) -> Iterator[tuple[str, Weights]]:
    for name, values in due.items():
        if before:
            yield "is that of the version before", {name: before[name]}
        yield "is zero", {name: values * 0}
        yield "is doubled", {name: values * 2}
        yield "is rounded to bfloat16", {name: values.bfloat16().to(values.dtype)}
        yield _SCALED, {name: (values.double() * (1 + _STEP)).to(values.dtype)}
        if values.ndim == 2:
            yield "is transposed", {name: values.t().reshape(values.shape)}
    for name, values in due.items():
        for other, twin in due.items():
            different_parts = sum(a != b for a, b in zip(name.split("."), other.split("."), strict=False))
            if name < other and values.shape == twin.shape and different_parts == 1:
                yield "are exchanged", {name: twin, other: values}


UPDATE_CHECKS = checks_of(globals(), but=LOADED_CHECKS)
