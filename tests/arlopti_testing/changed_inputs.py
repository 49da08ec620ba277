"""Change real-looking texts in a few places, with what has been hard on parsers."""

from hypothesis import strategies as st

# LaTeX, tags, templates, HTTP, JSON, and Unicode.
PIECES = (
    *"{}()[]<>$\\\"'%&#^_~|,.:;!?=+-*/ \n\r\t\0",
    *("\\boxed{", "\\fbox{", "\\left(", "\\right)", "\\frac{", "\\sqrt[", "\\text{ maybe}", "\\text{ cm}", "\\\\"),
    *("^{9^{9^9}}", "10^{1000000}!", "\\sum_{k=1}^{10^9}", "\\begin{pmatrix}", "\\equiv", " = ", "e400", "1e-9"),
    *("\\pmod{5}", "\\pm", "\\infty", "\\cup", "\\int", "\\log_2", "!!!!", "_2", "\\circ", " or "),
    *("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>assistant\n", "<|im_end|>", " is a knight", "(1) "),
    *("GET ", " HTTP/1.1\r\n", "Content-Length: 99\r\n", "Transfer-Encoding: chunked\r\n", "Expect: 100-continue"),
    *("\r\n\r\n", "ffffffffffffffff\r\n", "Upgrade: websocket\r\n", "Connection: close\r\n", "%00", "NaN", "null"),
    *("İ", "ı", "ß", "٣", "²", "\u2028", "\u202e", "\ud800", "\ufeff", "é", "\U0001f600", "９"),
)
VALUES = (None, True, 0, -1, 1e308, float("nan"), 10**400, "", "\ud800", [], {}, [[]], ["0.5", "2"], {"a": 1})


@st.composite
def changed(draw, text: str) -> str:
    """Draw a text of which up to six parts are left out, repeated or replaced."""
    for _ in range(draw(st.integers(0, 6))):
        start, stop = sorted(draw(st.integers(0, len(text))) for _ in range(2))
        piece = draw(st.sampled_from(PIECES) | st.characters(max_codepoint=0x2FF))
        between = draw(st.sampled_from(["", piece, piece * 50, text[start:stop] + piece, text[start:stop] * 3]))
        text = text[:start] + between + text[stop:]
    return text


@st.composite
def with_other_values(draw, record: dict) -> dict:
    """Draw a record of which one value is another one, or missing, or a text that is changed in some places."""
    name = draw(st.sampled_from(sorted(record)))
    others = {other: value for other, value in record.items() if other != name}
    values = st.sampled_from(VALUES) | (changed(record[name]) if isinstance(record[name], str) else st.nothing())
    return draw(st.sampled_from([record, others]) | values.map(lambda value: others | {name: value}))
