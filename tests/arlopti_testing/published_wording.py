"""Read Knights-and-Knaves puzzles back from the published wording, by regular expressions."""

import re

# Every way in which the published puzzles report a claim C of N.
PUBLISHED_FORMS = {
    "N said that C.",
    "N told you that C.",
    "N expressed that C.",
    'N said, "C."',
    'N stated, "C".',
    'N noted, "C".',
    'N remarked, "C".',
    'N commented, "C".',
    'N was heard saying, "C".',
    'N asserted: "C".',
    'As N put it, "C".',
    'According to N, "C".',
    'In a statement by N: "C".',
    'In N\'s words: "C".',
    '"C," N declared.',
    '"C," N claimed.',
    '"C," N mentioned.',
    '"C" - N.',
}
INTRODUCTION = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie. You meet {} inhabitants: {}. "
)


def read_puzzle(quiz):
    """Return names, statements and sentence forms."""
    number, people, rest = re.fullmatch(
        INTRODUCTION.replace(".", "[.]").format(r"(\d)", "([^.]*)") + "(.*) So who is a knight and who is a knave[?]",
        quiz,
    ).groups()
    names = people.replace(", and ", ", ").split(", ")
    assert int(number) == len(names)
    one_of = "|".join(names)
    atom = rf"(?:{one_of}) is (?:not )?a kn(?:ight|ave)"
    claim = rf"(?:[Ii]f {atom} then {atom}|{atom}(?: (?:and|or|if and only if) {atom})?)"
    statements, forms = [], set()
    for name in names:
        for form in sorted(PUBLISHED_FORMS):
            words = {"N": name, "C": f"({claim})"}
            option = re.sub(r"\bN\b|\bC\b", lambda placeholder, words=words: words[placeholder[0]], re.escape(form))
            found = re.match(rf"{option}(?: |$)", rest)
            if found:
                break
        else:
            raise AssertionError(f"no published sentence at the start of: {rest}")
        forms.add(form)
        statements.append(read_claim(found[1], names))
        rest = rest[found.end() :]
    assert not rest
    return names, tuple(statements), forms


def read_claim(text, names):
    if text.lower().startswith("if "):
        left, right = text[3:].split(" then ")
        return ("->", read_claim(left, names), read_claim(right, names))
    for words, kind in ((" if and only if ", "<=>"), (" and ", "and"), (" or ", "or")):
        if words in text:
            left, right = text.split(words)
            return (kind, read_claim(left, names), read_claim(right, names))
    name, is_not, role = re.fullmatch(r"(\w+) is (not )?a (knight|knave)", text).groups()
    atom = ("telling-truth" if role == "knight" else "lying", names.index(name))
    return ("not", atom) if is_not else atom
