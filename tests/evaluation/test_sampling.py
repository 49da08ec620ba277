"""Sampling specifications are parsed or refused, and the last that matches counts."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arlopti_openrlhf.evaluation.sampling import Sampling, parse_sampling, sampling_of, samplings_of, unmatched


def test_sampling():
    assert parse_sampling("aime:n=16,t=1.0") == Sampling("aime", 16, 1.0)
    specs = [parse_sampling(text) for text in ("*:n=4,t=0.6", "kk_*:n=1,t=0")]
    assert sampling_of("kk_3ppl", specs) == Sampling("kk_*", 1, 0.0)
    assert sampling_of("aime", specs) == Sampling("*", 4, 0.6)
    assert unmatched(specs, ["aime"]) == ["kk_*"] and unmatched(specs, ["kk_3ppl", "aime"]) == []
    for text in ("aime", "aime:n=0,t=1", "aime:t=1,n=2", "aime:n=4,t=0", ":n=1,t=0", "aime:n=1,t=x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_sampling(text)


def test_a_pattern_given_twice_samples_in_both_ways():
    default, *given = [parse_sampling(text) for text in ("*:n=8,t=1", "kk_*:n=1,t=0", "kk_*:n=1,t=1", "kk_3*:n=2,t=1")]
    assert samplings_of("kk_4ppl", [default, *given]) == given[:2]
    assert samplings_of("kk_3ppl", [default, *given]) == given[2:]
    assert samplings_of("aime", [default, *given]) == [default]
    # What is given for all sources takes the default's place, and the same way twice is one.
    everything = Sampling("*", 1, 0.0)
    assert samplings_of("aime", [default, everything, everything]) == [everything]


@given(st.one_of(st.text(), st.from_regex(r".*:n=\d+,t=[\d.]*", fullmatch=True)))
def test_a_sampling_is_parsed_or_refused(text):
    try:
        sampling = parse_sampling(text)
    except argparse.ArgumentTypeError:
        return
    assert sampling.n >= 1 and sampling.temperature >= 0
