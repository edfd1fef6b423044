"""Notices between ranks beside their calls."""

import json
from collections import deque
from dataclasses import asdict

from bagua_comm.transports.notices import ABORTED, LEFT, Notice, Notices


def test_a_notice_that_is_repeated_counts_as_received_again():
    mail = deque()

    def take(hear):
        if not mail:
            return False
        hear(*mail[0])
        mail.popleft()
        return True

    notices = Notices(lambda rank, message: mail.append((rank, message)), take)
    left, gave_up = Notice(LEFT, "", "", {}), Notice(ABORTED, "CommTimeout", "it waited", {"world": 3})
    notices.send([1], left)
    notices.listen()
    ((heard, first_s),) = notices.from_rank(1)
    assert heard == left
    mail.append((1, json.dumps(asdict(left)).encode()))
    notices.listen()
    ((heard, second_s),) = notices.from_rank(1)
    assert heard == left
    assert second_s > first_s
    notices.send([1, 2], gave_up)
    notices.listen()
    assert [notice for notice, _ in notices.from_rank(1)] == [left, gave_up]
    assert [notice for notice, _ in notices.from_rank(2)] == [gave_up]
