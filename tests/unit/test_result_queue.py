"""The queue of TensorFlow workers' results: recomputed after a loss, or failed."""

import pytest

from crosstrain.backends.tf.asynchronous.result_queue import ResultQueue


class Result:
    """A fetched result: values and errors in order; the last one repeats as the same object."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def fetch(self):
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def lost():
    return ConnectionError("the worker has died before its result was copied")


@pytest.fixture
def results():
    return ResultQueue(2)


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_lost_result_is_fetched_again(results, losses):
    results.put("ticket", Result(*(lost() for _ in range(losses)), 7))
    assert results.next() == ("ticket", 7)
    assert results.outstanding == 0


@pytest.mark.parametrize("losses", [0, 2])
def test_failed_computation_is_raised(results, losses):
    error = ValueError("an update was cut in the middle")
    results.put("ticket", Result(*(lost() for _ in range(losses)), error))
    results.put("other", Result(1))
    assert results.next() == ("other", 1)
    with pytest.raises(ValueError, match="cut in the middle"):
        results.next()
    assert results.outstanding == 0
