"""What the graders and the reward server lean on. A training can do without them, so its command leaves them out."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Signature, Text

PROTOCOL = "uvicorn.protocols.http.httptools_impl"
_OURS = "grading.limited_protocol.LimitedProtocol"
_COMPARE = "grading.math_compare._parse"

SEAMS: list[Seam] = [
    Signature(
        "math_verify.parser",
        "parse",
        "pred extraction_config fallback_mode extraction_mode parsing_timeout raise_on_error",
        _COMPARE,
    ),
    Text("math_verify.parser", "extract_expr", "parse_expr_cached(", "grading.math_compare: we replace it"),
    Text("math_verify.parser", "parse_latex_cached", "return latex2sympy(", "grading.math_compare: we replace it"),
    Text(
        "latex2sympy2_extended.latex2sympy2",
        "_Latex2Sympy.convert_atom_expr",
        "self.config.lowercase_symbols",
        "grading.math_compare: letter case is kept",
    ),
    Text(
        "latex2sympy2_extended.latex2sympy2",
        "convert_to_pct",
        "sympy.UnevaluatedExpr(sympy.Rational(1, 100))",
        "grading.math_equal: what a percentage is",
    ),
    *(
        Text(f"latex2sympy2_extended.{module}", f"{name}.__new__", "obj._unsorted_args = ", "grading.math_equal._read")
        for module, name in (("sets", "FiniteSet"), ("logic", "And"))
    ),
    Text("math_verify.parser", "extract_latex", "normalize_latex(", f"{_COMPARE}: where `units=False` is obeyed"),
    Text(
        "math_verify.parser",
        "extract_target_from_pred",
        'if extraction_mode == "first_match": break',
        f"{_COMPARE}: a formula that does not parse is no place to look for a number",
    ),
    Text(
        "latex2sympy2_extended.math_normalization",
        "normalize_latex",
        '_text = unit_superscript_regex.sub("", text)',
        "grading.math_units.split_unit: does it instead",
    ),
    *(
        Signature(PROTOCOL, f"HttpToolsProtocol.{name}", parameters, f"{_OURS}.{name}")
        for name, parameters in (
            ("connection_made", "self transport"),
            ("on_message_begin", "self"),
            ("data_received", "self data"),
            ("on_headers_complete", "self"),
            ("shutdown", "self"),
            ("connection_lost", "self exc"),
        )
    ),
    Text(
        PROTOCOL,
        "RequestResponseCycle.__init__",
        "self.more_body = True",
        f"{_OURS}._drop_unfinished",
    ),
    Text(
        PROTOCOL,
        "RequestResponseCycle.__init__",
        "self.response_complete = False",
        f"{_OURS}.connection_lost",
    ),
]
