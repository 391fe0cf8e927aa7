import json

from pdserve.cli.doctor.finding import Finding, Severity
from pdserve.cli.doctor.report import as_json, as_text

FINE = Finding(Severity.OK, "all is well")
FAULT = Finding(Severity.FAULT, "the link is cut", "no carrier", "plug it in")


def test_the_worst_comes_first_with_why_and_what_to_do() -> None:
    assert as_text([FINE, FAULT]).splitlines() == [
        "FAULT  the link is cut",
        "       no carrier",
        "       → plug it in",
        "OK     all is well",
        "",
        "1 fault, 0 that will be slow.",
    ]


def test_json_has_the_exit_status_and_every_finding() -> None:
    content = json.loads(as_json([FINE, FAULT]))
    assert content["exit_status"] == 1
    assert content["findings"][1] == {
        "severity": "fault",
        "what": "the link is cut",
        "why": "no carrier",
        "what_to_do": "plug it in",
    }
