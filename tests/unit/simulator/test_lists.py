"""What is left of apt's lists can be installed."""

from __future__ import annotations

from tests.simulator.node import lists

LIST = """Package: nfs-common
Pre-Depends: init-system-helpers (>= 1.54~)
Depends: libc6 (>= 2.34), mta:any | exim, awk

Package: libc6
Recommends: locales

Package: locales
Description: texts

Package: init-system-helpers
Version: 1

Package: exim
Version: 1

Package: mawk
Provides: awk (= 1), other

Package: games
Depends: libc6

"""


def test_what_is_wanted_stays_with_all_that_it_needs() -> None:
    left = lists.kept(LIST, ["nfs-common"])
    records = left.split("\n\n")
    assert [record.split("\n")[0] for record in records] == [
        "Package: nfs-common", "Package: libc6", "Package: locales", "Package: init-system-helpers", "Package: exim",
        "Package: mawk", "",
    ]  # fmt: skip
    assert set(records) < {*LIST.split("\n\n")}


def test_nothing_else_stays() -> None:
    left = lists.kept(LIST, ["libc6"])
    assert left == "Package: libc6\nRecommends: locales\n\nPackage: locales\nDescription: texts\n\n"
