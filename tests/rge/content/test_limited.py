"""Decoding in another process: the same results and errors, and the end of what takes too long or too much."""

import os
import time

import hostile
import pytest
from clips import clip
from pdfs import GREEN, RED, page, pdf

from rge.content import pdf as documents
from rge.content import video
from rge.content.limited import Decoder, LimitError, SizedRule
from rge.content.pdf import PdfError

pytestmark = pytest.mark.slow  # each starts a process


def test_results_and_errors_are_those_of_this_process():
    manual, film = pdf([page("kettle", RED), page("anchor", GREEN)]), clip(range(0, 1000, 40))
    rule, sized = video.VideoRule(fps=2.0), SizedRule(fps=2.0, size=(20, 10))
    with Decoder() as decode:
        assert decode(documents.num_pages, manual) == 2
        assert (
            decode(documents.render, manual, 2, dpi=36).tobytes() == documents.render(manual, 2, 36).tobytes()
        )
        assert decode(video.probe, film) == video.probe(film)
        images, seconds = decode(video.sample, film, sized)
        expected = video.sample(film, rule)
        assert seconds == expected.seconds
        assert [image.tobytes() for image in images] == [
            one.resize((20, 10), 3).tobytes() for one in expected.images
        ]
        with pytest.raises(PdfError) as error:
            decode(hostile.fail, b"abc")
        assert (error.value.reason, error.value.place) == ("it is damaged", 3)
        with pytest.raises(PdfError):
            decode(documents.num_pages, b"nothing")


def test_one_process_serves_all_until_it_must_be_ended():
    with Decoder(megabytes=256) as decode:
        first = decode(hostile.about, b"abc", 1, 2)
        assert first[1:] == (3, (1, 2))
        assert first[0] != os.getpid()
        assert decode(hostile.about, b"abcd")[:2] == (first[0], 4)
    with Decoder(seconds=0.5, megabytes=256) as decode, Decoder(megabytes=256) as beside:
        assert decode(hostile.about, b"a")[0] == first[0]
        began = time.monotonic()
        with pytest.raises(LimitError) as error:
            decode(hostile.sleep, b"abc")
        assert time.monotonic() - began < 5
        assert (error.value.kind, error.value.key) == ("time", "sleep")
        assert beside(hostile.about, b"")[0] != first[0]
    for taker in (hostile.fill, hostile.crash):
        with Decoder(megabytes=256) as decode:
            with pytest.raises(LimitError) as error:
                decode(taker, b"abc")
            assert (error.value.kind, error.value.key) == ("memory", taker.__name__)
            assert decode(hostile.about, b"abc")[1] == 3  # by another process
