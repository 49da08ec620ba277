"""Make the tables and the picture of the study from study/results, as far as the runs are done.

    python -m study.report    # into docs/study.md, between its two marks, and docs/study.png

Every interval is a 95% interval. Over seeds it is Student's, with n - 1 degrees of freedom. The tests are paired by
seed, because runs of one seed share the warm start, the puzzles and their order.
"""

import argparse
from pathlib import Path

from study import runs
from study.picture import picture
from study.runs import ROOT
from study.stored import RESULTS, load
from study.tables import tables

START, END = "<!-- tables: python -m study.report -->", "<!-- end of tables -->"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m study.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of study.md and study.png")
    args = parser.parse_args()
    results = load([*runs.STUDY, *runs.TUNING], args.results)
    page = args.docs / "study.md"
    text = page.read_text("utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        parser.error(f"{page}: needs the lines {START} and {END}, once each")
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{tables(results)}\n{END}{after}", "utf-8")
    picture(results, args.docs / "study.png")
    print(f"{len(results)} of {len(runs.STUDY) + len(runs.TUNING)} runs: {page}")


if __name__ == "__main__":
    main()
