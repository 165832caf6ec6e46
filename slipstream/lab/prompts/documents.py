"""Long documents of any length: a chronicle, cut to a token budget, with a question about it."""

from __future__ import annotations

import random
from collections.abc import Callable

from slipstream.errors import InvalidConfig
from slipstream.lab.prompts.chronicle import STYLES, Chronicle, Section, words
from slipstream.lab.prompts.prompt import CountTokens, Prompt, user_prompt

_SHORTEST = 300  # below, 2 % is less than one more index word


def document_prompt(
    *, seed: int, index: int, tokens: int, count_tokens: CountTokens, style: str | None = None
) -> Prompt:
    """A document and a question, `tokens` long together, to within 2 % below.

    The style follows from seed and index unless named. Raises `InvalidConfig` below 300 tokens.
    """
    _check_length(tokens)
    rng = random.Random(f"doc/{seed}/{index}")
    style = style or STYLES[(seed + index) % len(STYLES)]
    chronicle = Chronicle(style, rng)
    ask = rng.choice(_QUESTIONS)

    def compose(document: str, question: str) -> str:
        return f"{document}\n\n---\n{question}"

    longest = "word " * 60  # no question is longer; the fit uses the real one
    reserve = count_tokens(compose("", longest))
    sections = _sections(chronicle, max(tokens - reserve, 0), count_tokens)
    question = ask(chronicle)
    text = _fit(
        lambda document: compose(document, question), chronicle, sections, tokens, count_tokens
    )
    return user_prompt(f"doc-{style}-{seed}-{index}", text)


def document(
    *, rng: random.Random, tokens: int, count_tokens: CountTokens, style: str | None = None
) -> str:
    """A document of `tokens` tokens, to within 2 % below, without a question.

    Raises `InvalidConfig` below 300 tokens.
    """
    _check_length(tokens)
    chronicle = Chronicle(style or rng.choice(STYLES), rng)
    sections = _sections(chronicle, tokens, count_tokens)
    return _fit(lambda text: text, chronicle, sections, tokens, count_tokens)


def _check_length(tokens: int) -> None:
    if tokens < _SHORTEST:
        raise InvalidConfig(
            f"A document of {tokens} tokens was asked for; the shortest is {_SHORTEST}."
        )


def _sections(chronicle: Chronicle, tokens: int, count_tokens: CountTokens) -> list[Section]:
    """Sections whose lengths sum to `tokens` or more: the last one crosses the line."""
    used = sum(count_tokens(line + "\n\n") for line in chronicle.preface)
    sections: list[Section] = []
    while not sections or used <= tokens:
        sections.append(chronicle.section())
        used += count_tokens(sections[-1].text() + "\n\n")
    return sections


def _fit(
    compose: Callable[[str], str],
    chronicle: Chronicle,
    sections: list[Section],
    tokens: int,
    count_tokens: CountTokens,
) -> str:
    """The longest text within `tokens`: sections, sentences of the next one, then index words."""

    def fits(text: str) -> bool:
        return count_tokens(compose(text)) <= tokens

    def joined(count: int) -> str:
        return "\n\n".join([*chronicle.preface, *(s.text() for s in sections[:count])])

    whole = len(sections) - 1
    while whole and not fits(joined(whole)):  # lengths of parts need not add up
        whole -= 1
    body = joined(whole)
    partial = sections[whole]
    for index, sentence in enumerate(partial.sentences):
        longer = body + (f" {sentence}" if index else f"\n\n{partial.heading}\n{sentence}")
        if not fits(longer):
            break
        body = longer
    best = body
    index_words = words("index")
    chronicle.rng.shuffle(index_words)
    for used in range(1, len(index_words) + 1):
        longer = f"{body}\n\nIndex: {', '.join(index_words[:used])}."
        if not fits(longer):
            break
        best = longer
    return compose(best)


# Chosen for the length of the answers alone: asked for a summary, a list or a quotation, the
# embedded model stops after 16 tokens, too few to time (docs/log.md, 2026-11-30).


def _go_on(chronicle: Chronicle) -> str:
    return "Continue the record above: write its next section in the same style."


def _report(chronicle: Chronicle) -> str:
    return "Write a detailed report, in several paragraphs, on what the record above tells."


def _recite(chronicle: Chronicle) -> str:
    return "Repeat the first section of the record above, word for word."


def _retell(chronicle: Chronicle) -> str:
    first = max(chronicle.number // 2 - 1, 1)
    return (
        f"Retell section {first} in your own words for a reader who has not seen the "
        "record, and finish with one sentence on why it matters."
    )


_QUESTIONS = (_go_on, _report, _recite, _retell)
