"""Make the tables and the picture of the study from study/results, as far as the runs are done.

    python -m study.report             # into docs/study.md, between its two marks, and docs/study.png
    python -m study.report --family    # the same for docs/study_family.md, and a table in docs/token_methods.md

Tables of more than twelve rows are CSV files beside the results. The page has links to them.

Every interval is a 95% interval. Over seeds it is Student's, with n - 1 degrees of freedom. The tests are paired by
seed, because runs of one seed share the warm start, the puzzles and their order.
"""

import argparse
import csv
from pathlib import Path

from study import family, runs, tables
from study.picture import family_picture, picture
from study.runs import ROOT
from study.stored import AGREEMENT, AR_LOPTI, BY_STRUCTURE, FAMILY, NEXT, RESULTS, load

START, END = "<!-- tables: python -m study.report -->", "<!-- end of tables -->"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m study.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the page and its picture")
    parser.add_argument("--family", action="store_true", help="the study of the family of token methods")
    args = parser.parse_args()
    planned = runs.FAMILY if args.family else [*runs.STUDY, *runs.TUNING]
    results = load(planned, args.results / (FAMILY if args.family else AR_LOPTI))
    page = args.docs / ("study_family.md" if args.family else "study.md")
    try:
        if args.family:
            again = load(runs.FAMILY_CONTROLS, args.results / BY_STRUCTURE)
            later = load(runs.NEXT, args.results / NEXT)
            text, files = family.tables(results, again, later, args.results / AGREEMENT)
            put(page, text)
            for name, table in files.items():
                with open(args.results / name, "w", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerows(table)
            put(args.docs / "token_methods.md", family.short_table(results, later))
        else:
            put(page, tables.tables(results))
    except ValueError as error:
        parser.error(str(error))
    (family_picture if args.family else picture)(results, page.with_suffix(".png"))
    print(f"{len(results)} of {len(planned)} runs: {page}")


def put(page: Path, generated: str) -> None:
    """Write a generated text between the two marks of a page.

    Raises:
        ValueError: the page does not have each of them once.
    """
    text = page.read_text("utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: needs the lines {START} and {END}, once each")
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{generated}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
