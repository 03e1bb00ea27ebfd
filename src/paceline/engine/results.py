"""Results of requests that ended, until someone asks for them or newer ones push them out."""

from __future__ import annotations

from collections import OrderedDict

from paceline.engine.request import RequestResult

NUM_KEPT_RESULTS = 4096


class FinishedRequests:
    """The last 4096 results by request id."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, RequestResult] = OrderedDict()

    def put(self, result: RequestResult) -> None:
        """Keep one; the oldest goes where there are too many."""
        self._results[result.request_id] = result
        while len(self._results) > NUM_KEPT_RESULTS:
            self._results.popitem(last=False)

    def get(self, request_id: str) -> RequestResult | None:
        """Look one up; None where it is not there."""
        return self._results.get(request_id)

    def take(self, request_id: str) -> RequestResult:
        """Give one out, and keep it no longer."""
        return self._results.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Drop one if it is there: a new request may have the id of an old one."""
        self._results.pop(request_id, None)
