"""Serve rewards to OpenRLHF's `--reward.remote_url http://host:port/get_reward`.

    arlopti serve --grader kk --grader math --port 5000

Each grader answers at /NAME/get_reward, and the first one at /get_reward too. The token, if any, comes from a file or
from ARLOPTI_REWARD_TOKEN. A run that has this variable sends it as a bearer token. With `--ops off` it sends none.
"""

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf.cli.arguments import integer, number
from arlopti_openrlhf.cli.bad_input import Parser, command_parser
from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.grader import Limits


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("serve", __doc__)
    parser.add_argument(
        "--grader",
        action="append",
        required=True,
        type=_grader,
        metavar=f"{'|'.join(REWARDS)}|PATH.py",
        help="a reward of the package, or a file with reward_func(queries, prompts, labels), any number of times",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=5000, help="default: 5000")
    parser.add_argument(
        "--workers",
        type=integer(1),
        default=min(8, os.cpu_count() or 1),
        help="processes that grade, per grader (default: the cores, at most 8)",
    )
    parser.add_argument("--token-file", metavar="PATH", help="file with the bearer token that clients must present")
    limits, positive = Limits(), number("(0, inf)")
    for flag, kind, default, text in (
        (
            "--max-body-mib",
            positive,
            limits.body_bytes // 2**20,
            "largest request (default: {:g} MiB)",
        ),
        ("--max-batch", integer(1), limits.batch, "queries in one request (default: {:g})"),
        ("--max-queue", integer(1), limits.queue, "queries that wait or are graded, per grader (default: {:g})"),
        ("--max-seconds", positive, limits.seconds, "for one request, waiting included (default: {:g})"),
        (
            "--grading-seconds",
            positive,
            limits.grading_seconds,
            "for one call of a reward function (default: {:g}). math takes ARLOPTI_MATH_TIMEOUT for each answer (2)",
        ),
    ):
        parser.add_argument(flag, type=kind, default=default, help=text.format(default))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    names = [name for name, _ in args.grader]
    if len(set(names)) < len(names):
        parser.error(f"argument --grader: two graders have one name: {', '.join(names)}")
    token = os.environ.get("ARLOPTI_REWARD_TOKEN")
    if args.token_file:
        try:
            token = Path(args.token_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # the latter for what is no text
            parser.error(f"argument --token-file: {error}")
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        parser.error("the token must be visible ASCII, because it is sent in a header")
    if not 0 <= args.port < 2**16:  # uvicorn would listen on another one
        parser.error(f"argument --port: {args.port} is no port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:  # uvicorn would say so once the graders are ready
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        parser.error(f"argument --port: {args.host}:{args.port} cannot be listened on: {error.strerror or error}")
    if token is None and not _is_this_machine(args.host):
        risk = f"whoever reaches {args.host}:{args.port} may use the graders: give --token-file, or --host 127.0.0.1"
        print(f"arlopti serve: warning: no token: {risk}", file=sys.stderr, flush=True)
    from arlopti_openrlhf.grading.server import RewardServer, serve

    limits = Limits(
        int(args.max_body_mib * 2**20), args.max_batch, args.max_queue, args.max_seconds, args.grading_seconds
    )
    server = RewardServer(dict(args.grader), args.workers, limits, token)
    try:
        server.start()
    except RuntimeError as error:
        problem, _, its_traceback = str(error).partition("\n")
        print(its_traceback.rstrip(), file=sys.stderr)
        parser.error(f"argument --grader: {problem}")
    serve(server, args.host, args.port)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _grader(text: str) -> tuple[str, str]:
    """Return the name in the URL, and the source."""
    if text in REWARDS:
        return text, text
    path = Path(text)
    if path.suffix != ".py" or not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not {', '.join(REWARDS)} or a Python file that exists")
    return path.stem, text
