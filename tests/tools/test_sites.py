"""Sites that are down, and a network that is."""

from graphpo_agent.net.store import CallStore
from tests.tools.fetching import OAK, failure_of, reader_for


def reader_of(site, **options):
    """Hosts whose names begin with ``down`` are where nobody answers."""
    return reader_for(
        site,
        allowed_networks=["127.0.0.0/8"],
        resolver=lambda host, port: ["127.9.9.9" if host.startswith("down") else "127.0.0.1"],
        **options,
    )


def test_a_site_that_is_down_while_others_answer_is_a_page_that_cannot_be_had(site, tmp_path):
    site.page("/", OAK)
    store = CallStore(tmp_path / "calls.sqlite", "replay")
    reader = reader_of(site, store=store)
    assert reader.read(site.url(host="oak.example")).text == "An oak is a tree."
    for _ in range(12):
        assert failure_of(reader, site.url(host="down.example")) == "no_result"
    # It is asked again, and not taken for what this page is.
    up = reader_for(site, store=store, resolver=lambda host, port: ["127.0.0.1"])
    assert up.read(site.url(host="down.example")).text == "An oak is a tree."


def test_sites_that_fail_one_after_the_other_are_an_outage_until_one_answers(site):
    site.page("/", OAK)
    reader = reader_of(site)
    down = [site.url(host=f"down-{number}.example") for number in range(6)]
    assert failure_of(reader, down[0]) == "transient", "no site has answered yet"
    reader.read(site.url(host="oak.example"))
    kinds = [failure_of(reader, url) for url in down]
    assert kinds == ["no_result"] * 4 + ["transient"] * 2
    assert failure_of(reader, site.url("/gone", host="oak.example")) == "no_result"
    assert failure_of(reader, down[0]) == "no_result"
