"""Training prompts that quote nothing: programs with rules, short tasks, error messages."""

from __future__ import annotations

import random
import re

from slipstream.train.wording import Message, listed, lists, put, say, user


def brief(rng: random.Random) -> list[Message]:
    """An order for a program with the rules it has to follow, often with its head or an input."""
    own, words = lists()["brief"], {k: rng.choice(lists()["words"][k]) for k in _SUBJECT}
    form, goal = say(rng, rng.choice(own["form"]), words), say(rng, rng.choice(own["goal"]), words)
    why = say(rng, rng.choice(own["why"]), words)
    order = f"Write {form} that {goal}."
    parts = [" ".join(filter(None, (why, order) if rng.random() < 0.7 else (order, why)))]
    told = rng.sample(own["story"], rng.choice((0, 0, 1, 2, 3)))
    parts.append(" ".join(say(rng, one, words) for one in told))
    if rng.random() < 0.4:
        parts.append(_signature(rng, words["lang"], words["noun"], words["field"]))
    if rng.random() < 0.3:
        parts.append(_example(rng, words["field"]))
    rules = [say(rng, rule, words) for rule in rng.sample(own["rule"], rng.randint(3, 9))]
    parts.append(listed(rng, rules, rng.choice(("Rules:", "Requirements:", "Please note:", ""))))
    ends = rng.sample(own["end"], rng.randint(0, 4))
    parts.append(" ".join(say(rng, end, words) for end in ends))
    return user("\n\n".join(filter(None, parts)))


def task(rng: random.Random) -> list[Message]:
    """A short task, a short question, or an error message."""
    own, words = lists()["task"], {"lang": rng.choice(lists()["words"]["lang"])}
    what = rng.random()
    if what < 0.5:
        return user(say(rng, rng.choice(own["ask"]), words | {"verb": rng.choice(own["verb"])}))
    if what < 0.8:
        return user(say(rng, rng.choice(own["how"]), words | {"goal": rng.choice(own["goal"])}))
    error = say(rng, rng.choice(own["error"]))
    return user(put(say(rng, rng.choice(own["error_ask"]), words, keep=("error",)), error=error))


_SUBJECT = ("lang", "noun", "field")
_HEADS = {
    "Python": "def {verb}_{many}({many}: list[{One}], limit: int = {n}) -> dict[str, {One}]: ...",
    "JavaScript": "export function {verb}{Many}({many}, { limit = {n} } = {}) {}",
    "TypeScript": "function {verb}{Many}({many}: {One}[], limit: number): Map<string, {One}>;",
    "Go": "func {Verb}{Many}({many} []{One}, limit int) (map[string]{One}, error)",
    "Rust": "pub fn {verb}_{many}({many}: &[{One}], limit: usize) -> Result<Vec<{One}>, Error>",
    "C": "int {verb}_{many}(const struct {one} *{many}, size_t count, struct {one} *out);",
    "C++": "std::vector<{One}> {verb}_{many}(std::span<const {One}> {many}, std::size_t limit);",
    "Java": "public static List<{One}> {verb}{Many}(List<{One}> {many}, int limit)",
    "Kotlin": "fun {verb}{Many}({many}: List<{One}>, limit: Int = {n}): Map<String, {One}>",
    "C#": "public static IReadOnlyList<{One}> {Verb}{Many}(IEnumerable<{One}> {many}, int limit)",
    "SQL": "CREATE TABLE {many} (id INTEGER PRIMARY KEY, {field} TEXT NOT NULL, added TIMESTAMP);",
    "Bash": "./{verb}-{many}.sh [--limit N] [--dry-run] FILE...",
    "PHP": "function {verb}{Many}(array ${many}, int $limit = {n}): array",
    "Swift": "func {verb}{Many}(_ {many}: [{One}], limit: Int) throws -> [String: {One}]",
}
_VERBS = ("group", "find", "merge", "check", "load", "split", "count", "plan", "sort", "convert")
_SAYS = ("The head is fixed:", "It should look like this:", "Start from this:", "I have:", "")


def _signature(rng: random.Random, lang: str, noun: str, field: str) -> str:
    """How it is to be called, in a block; "" for languages without one."""
    many, verb = re.sub(r"\W", "_", noun), rng.choice(_VERBS)
    one = many[:-1] if many.endswith("s") else many
    words = {"many": many, "one": one, "verb": verb, "n": str(rng.randint(2, 50))}
    words |= {key.capitalize(): words[key].title().replace("_", "") for key in words}
    head = put(_HEADS.get(lang, ""), **words, field=re.sub(r"\W", "_", field))
    if not head:
        return ""
    return f"{rng.choice(_SAYS)}\n\n```{lang.lower()}\n{head}\n```".strip()


def _example(rng: random.Random, field: str) -> str:
    """A few lines of input, with a gap as real ones have it."""
    names = rng.sample(("Oslo", "Lima", "Riga", "Graz", "Cork", "Bari", "Nara", "Kiel"), 4)
    rows = [f"{i},{name},{rng.randint(1, 990)}" for i, name in enumerate(names, rng.randint(1, 90))]
    rows[rng.randrange(4)] = f"7,{names[0]},"
    table = "\n".join([f"id,city,{field}", *rows])
    return f"{rng.choice(('An example:', 'The input looks like this:'))}\n\n```\n{table}\n```"
