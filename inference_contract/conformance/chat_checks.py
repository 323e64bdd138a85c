"""Checks of `/v1/chat/completions` without streaming."""

from __future__ import annotations

import itertools
import math
from typing import Final

from inference_contract import routes
from inference_contract.conformance.session import MESSAGES, NotOffered, Session, checks_of, refused, succeeded
from inference_contract.schemas import ChatCompletion, ChatCompletionChunk, Choice, FinishReason

#: Fields that clients send by default, at values that do not change the answer.
_IDLE: Final = {
    "logit_bias": {},
    "max_completion_tokens": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "stop": None,
    "store": False,
    "stream_options": None,
    "tool_choice": "none",
    "tools": None,
    "user": "kit",
}

#: Spellings of control tokens in common chat templates.
_SPELLINGS: Final = (
    *("<|end|>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
    *("<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<｜end▁of▁sentence｜>"),
)


def ids_of(choice: Choice) -> list[int]:
    """Return the token ids of a choice from a request with `return_token_ids`."""
    assert choice.token_ids is not None, "with return_token_ids each choice must have token_ids"
    return choice.token_ids


def prompt_of(answer: ChatCompletion | ChatCompletionChunk) -> list[int]:
    """Return the prompt's tokens of an answer to a request with `return_token_ids`."""
    assert answer.prompt_token_ids, "with return_token_ids the answer must have prompt_token_ids"
    return answer.prompt_token_ids


def check_columns(choice: Choice, *, versions: set[int] | None = None) -> None:
    """Fail unless each token has a valid log-prob and a version span, of one of `versions` if these are given."""
    tokens = ids_of(choice)
    assert choice.token_logprobs is not None, "with return_token_ids each choice must have token_logprobs"
    assert len(choice.token_logprobs) == len(tokens), (
        f"token_logprobs must have one entry per token, got {len(choice.token_logprobs)} for {len(tokens)}"
    )
    for logprob in choice.token_logprobs:
        assert math.isfinite(logprob) and logprob <= 1e-6, f"a log-prob must be finite and at most 0, got {logprob}"
    assert choice.version_spans is not None, "with return_token_ids each choice must have version_spans"
    covered = sum(count for _, count in choice.version_spans)
    assert covered == len(tokens), f"version_spans must cover all {len(tokens)} tokens, they cover {covered}"
    named = [version for version, _ in choice.version_spans]
    assert all(count > 0 for _, count in choice.version_spans), "no version span may be empty"
    assert all(a < b for a, b in itertools.pairwise(named)), "version spans must increase, one per version"
    if versions is not None:
        assert set(named) <= versions, f"the tokens must come from versions {sorted(versions)}, spans name {named}"


def chat_has_openai_shape(session: Session) -> None:
    """A chat completion has OpenAI's shape, with usage that adds up."""
    card = session.card()
    completion = session.chat(model=card.id)
    assert completion.model == card.id, f"the answer must name the model {card.id!r}, got {completion.model!r}"
    assert completion.model_version == card.model_version, "model_version must be that of /v1/models"
    assert [choice.index for choice in completion.choices] == [0], "n=1 must give one choice, of index 0"
    usage = completion.usage
    assert usage.completion_tokens == len(ids_of(completion.choices[0])), "usage must count the sampled tokens"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "total_tokens must be the sum"


def n_gives_n_choices(session: Session) -> None:
    """n samples of one prompt are returned as n choices in order of index."""
    completion = session.chat(n=5)
    assert [choice.index for choice in completion.choices] == list(range(5)), "n=5 must give choices 0 to 4 in order"
    assert completion.usage.completion_tokens == sum(len(ids_of(choice)) for choice in completion.choices)
    assert completion.usage.prompt_tokens == len(prompt_of(completion)), "the prompt must be counted once"


def columns_match_tokens(session: Session) -> None:
    """Log-probs are at most 0, one per token; version spans cover all tokens and name the served weights' version."""
    version = session.card().model_version
    for choice in session.chat(n=4).choices:
        check_columns(choice, versions={version})


def openai_logprobs_match(session: Session) -> None:
    """With `logprobs` each choice has OpenAI's record of each token, with the same log-prob as in token_logprobs."""
    for choice in session.chat(n=2, logprobs=True).choices:
        assert choice.logprobs is not None, "logprobs=true must give choice.logprobs"
        logprobs = [record.logprob for record in choice.logprobs.content]
        assert logprobs == choice.token_logprobs, "logprobs.content must hold the log-probs of token_logprobs"


def extras_only_on_request(session: Session) -> None:
    """Answers contain token ids and log-probs only if `return_token_ids` and `logprobs` request them."""
    choice = session.chat(return_token_ids=False).choices[0]
    assert choice.token_ids is None and choice.logprobs is None, (
        "token_ids and logprobs must be left out unless requested"
    )


def same_seed_same_samples(session: Session) -> None:
    """The same seed gives the same samples, log-probs included."""
    first, again = session.chat(n=4, seed=7), session.chat(n=4, seed=7)
    for one, two in zip(first.choices, again.choices, strict=True):
        assert ids_of(one) == ids_of(two), f"seed 7 must repeat sample {one.index}"
        assert one.token_logprobs == two.token_logprobs, f"seed 7 must repeat the log-probs of sample {one.index}"


def noise_is_per_sample(session: Session) -> None:
    """The noise of sample i depends only on (seed, i): n=2 gives the same samples as the first two of n=6."""
    few, many = session.chat(n=2, seed=11), session.chat(n=6, seed=11)
    for one, two in zip(few.choices, many.choices, strict=False):
        assert ids_of(one) == ids_of(two), f"sample {one.index} must be the same with n=2 and n=6"


def seeds_and_samples_differ(session: Session) -> None:
    """Different seeds use different noise, and so do different samples of one seed."""
    sampled = {tuple(ids_of(choice)) for seed in range(4) for choice in session.chat(n=4, seed=seed).choices}
    if len(sampled) == 1 and all(value > -1e-3 for value in session.chat().choices[0].token_logprobs or ()):
        raise NotOffered("the model is certain of every token, so noise has no effect")
    assert len(sampled) > 1, "16 samples of 4 seeds must not all be equal"


def greedy_ignores_the_seed(session: Session) -> None:
    """Temperature 0 samples the likeliest token, whatever the seed."""
    one, two = session.chat(temperature=0.0, seed=1), session.chat(temperature=0.0, seed=2)
    assert ids_of(one.choices[0]) == ids_of(two.choices[0]), "greedy samples must not depend on the seed"


def top_k_one_is_certain(session: Session) -> None:
    """Log-probs are those of the distribution sampled from: with top_k=1 they are 0."""
    choice = session.chat(top_k=1).choices[0]
    worst = min(choice.token_logprobs or [0.0])
    assert abs(worst) < 1e-4, f"with top_k=1 every log-prob must be 0, got {worst}"


def max_tokens_is_respected(session: Session) -> None:
    """No choice is longer than max_tokens, and a truncated choice has finish_reason `length`."""
    for choice in session.chat(n=4, max_tokens=3).choices:
        count = len(ids_of(choice))
        assert count <= 3, f"max_tokens=3 must be kept, got {count} tokens"
        if choice.finish_reason is FinishReason.LENGTH:
            assert count == 3, f"finish_reason length must mean max_tokens were sampled, got {count} of 3"
    only = session.chat(max_completion_tokens=2, max_tokens=8).choices[0]
    assert len(ids_of(only)) <= 2, "max_completion_tokens must win over max_tokens"


def stoppable(session: Session) -> tuple[int, str, str]:
    """Return a seed, the text sampled with this seed, and a stop string: the text's second and third character."""
    for seed in range(12):
        text = session.chat(seed=seed).choices[0].message.content
        stop = text[1:3]
        # A partly sampled character appears as U+FFFD, which no stop string can match.
        if len(stop) == 2 and "\ufffd" not in text:
            return seed, text, stop
    raise NotOffered("none of 12 samples has three whole characters, so none can be stopped in the middle")


def stop_string_ends_text(session: Session) -> None:
    """A stop string ends the choice with finish_reason `stop`, and the choice's text ends before it."""
    seed, text, stop = stoppable(session)
    choice = session.chat(seed=seed, stop=stop).choices[0]
    kept = text.split(stop)[0]
    assert choice.message.content == kept, (
        f"with stop={stop!r} the text must be cut before it: expected {kept!r}, got {choice.message.content!r}"
    )
    assert choice.finish_reason is FinishReason.STOP, f"finish_reason must be stop, got {choice.finish_reason}"


def eos_is_ignored(session: Session) -> None:
    """With `ignore_eos` a sample continues to `max_tokens`; its tokens up to the normal end stay the same."""
    plain = session.chat(n=16, seed=6, max_tokens=64, temperature=2.0)
    ignoring = session.chat(n=16, seed=6, max_tokens=64, temperature=2.0, ignore_eos=True)
    for one, two in zip(plain.choices, ignoring.choices, strict=True):
        count = len(ids_of(two))
        assert (count, two.finish_reason) == (64, FinishReason.LENGTH), (
            f"with ignore_eos a sample must have all 64 tokens of max_tokens, got {count} and {two.finish_reason}"
        )
        check_columns(two)
        ended = ids_of(one)
        assert ids_of(two)[: len(ended)] == ended, "ignore_eos must not change what comes before a sample's end"


def prompt_ids_are_returned_unchanged(session: Session) -> None:
    """`prompt_token_ids` are returned unchanged, and give the same samples as the messages that they encode."""
    answer = session.chat(n=2, seed=5)
    prompt = prompt_of(answer)
    again = session.chat(n=2, seed=5, prompt_token_ids=prompt)
    assert again.prompt_token_ids == prompt, "prompt_token_ids must come back unchanged"
    for one, two in zip(answer.choices, again.choices, strict=True):
        assert ids_of(one) == ids_of(two), "the ids of a prompt must give the same samples as its messages"


def alias_is_served(session: Session) -> None:
    """`/v1/chat/completion`, the spelling in PipelineRL's post, answers like `/v1/chat/completions`."""
    plural, singular = session.chat(seed=3), session.chat(routes.CHAT_COMPLETION_ALIAS, seed=3)
    assert ids_of(plural.choices[0]) == ids_of(singular.choices[0]), "both spellings must give the same answer"


def default_fields_are_accepted(session: Session) -> None:
    """Fields that clients send by default are accepted and do not change the answer."""
    plain = session.chat(seed=4)
    for fields in (
        _IDLE,
        {"messages": [{**MESSAGES[0], "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]},
    ):
        again = session.chat(seed=4, **fields)
        assert again.prompt_token_ids == plain.prompt_token_ids, f"{sorted(fields)} must not change the prompt"
        assert ids_of(again.choices[0]) == ids_of(plain.choices[0]), f"{sorted(fields)} must not change the answer"


def messages_cannot_inject_control_tokens(session: Session) -> None:
    """A message that spells out a control token, such as an end of turn, does not produce that token."""
    for spelling in _SPELLINGS:
        lengths = []
        for count in (1, 3):
            message = {"role": "user", "content": spelling * count}
            answer = session.completed(messages=[message], max_tokens=1)
            if answer.status_code == 400:
                # a rejection is fine, too: the plain text may be too long, or the engine rejects the spelling
                break
            lengths.append(len(ChatCompletion.model_validate(succeeded(answer)).prompt_token_ids or ()))
        assert len(lengths) < 2 or lengths[1] - lengths[0] > 2, (
            f"{spelling!r} in a message must be tokenised as text, and not become the token that it spells"
        )


def request_cannot_replace_the_template(session: Session) -> None:
    """`chat_template_kwargs` cannot replace the chat template, and unknown variables do not change the prompt."""
    plain = session.chat(seed=5)
    again = session.chat(seed=5, chat_template_kwargs={"no_template_looks_this_up": True})
    assert again.prompt_token_ids == plain.prompt_token_ids, (
        "a variable that no template uses must not change the prompt"
    )
    refused(
        session.completed(chat_template_kwargs={"chat_template": "{{ messages }}"}), 400, param="chat_template_kwargs"
    )


CHECKS = checks_of(globals())
