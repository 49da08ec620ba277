"""Make the tables and pictures of docs/results.md from study/results, as far as the runs are done.

    python -m study.report

Each table is a CSV file beside the results. The short ones that decide are also in docs/results.md and
docs/token_methods.md, between marks.

Every interval is a 95% interval. Over seeds it is Student's, with n - 1 degrees of freedom. The tests are paired by
seed, because runs of one seed share the warm start, the puzzles and their order.
"""

import argparse
import csv
from pathlib import Path

from study import family, runs, tables, validation
from study.picture import family_picture, picture
from study.runs import ROOT
from study.stored import AGREEMENT, AR_LOPTI, BY_STRUCTURE, FAMILY, NEXT, RESULTS, load

START, END = "<!-- tables: python -m study.report -->", "<!-- end of tables -->"


# {file of results: the runs that it is to have}
STUDIES = {
    AR_LOPTI: [*runs.STUDY, *runs.TUNING],
    FAMILY: runs.FAMILY,
    BY_STRUCTURE: runs.FAMILY_CONTROLS,
    NEXT: runs.NEXT,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m study.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages and their pictures")
    args = parser.parse_args()
    found = {name: load(planned, args.results / name) for name, planned in STUDIES.items()}
    try:
        for page, generated in page_tables(found).items():
            put(args.docs / page, *generated)
    except ValueError as error:
        parser.error(str(error))
    for name, table in csv_tables(found, args.results).items():
        with open(args.results / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
    picture(found[AR_LOPTI], args.docs / "study.png")
    family_picture(found[FAMILY], args.docs / "study_family.png")
    for name, planned in STUDIES.items():
        print(f"{name}: {len(found[name])} of {len(planned)} runs")


def page_tables(found: dict[str, dict[str, dict]]) -> dict[str, list[str]]:
    """Return the tables of each page in docs, in their order, from the results of `STUDIES`."""
    methods = family.methods_table(found[FAMILY], found[NEXT])
    of_first = [tables.variants_table(found[AR_LOPTI]), tables.ablations_table(found[AR_LOPTI])]
    return {"results.md": [*of_first, methods], "token_methods.md": [methods]}


def csv_tables(found: dict[str, dict[str, dict]], folder: Path) -> dict[str, tables.Table]:
    """Return all tables by the names of their CSV files, from the results of `STUDIES` in a folder."""
    return {
        **tables.files(found[AR_LOPTI]),
        **family.files(found[FAMILY], found[BY_STRUCTURE], found[NEXT]),
        **validation.files(found[FAMILY], folder / AGREEMENT),
    }


def put(page: Path, *generated: str) -> None:
    """Write generated texts into a page, each between two marks.

    Raises:
        ValueError: the page has not as many pairs of marks.
    """
    before, *parts = page.read_text("utf-8").split(START)
    if len(parts) != len(generated) or any(part.count(END) != 1 for part in parts):
        raise ValueError(f"{page}: needs the lines {START} and {END}, {len(generated)} times each")
    after = (f"{START}\n\n{text}\n{END}{part.split(END)[1]}" for text, part in zip(generated, parts, strict=True))
    page.write_text("".join([before, *after]), "utf-8")


if __name__ == "__main__":
    main()
