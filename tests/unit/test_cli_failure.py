from penstock.errors import reason

SERVE = """\
The deployment failed to start 1 times in a row. This may be due to a problem with its constructor.
See controller logs for details. Error:
\x1b[36mray::ServeReplica:penstock:LLMServer.initialize_and_get_metadata()\x1b[39m (pid=12, ip=10.0.0.1)
  File "/site-packages/ray/serve/_private/replica.py", line 1, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "engine.py", line 3, in start
    raise EngineStartFailed(text) from error
penstock.errors.EngineStartFailed: max_model_len (99999) is greater than 16384. Lower it.
"""


def test_own_error_inside_serves_message_is_the_reason():
    assert reason(SERVE) == "max_model_len (99999) is greater than 16384. Lower it."


def test_own_error_is_preferred_to_what_was_raised_because_of_it():
    assert reason(SERVE + "RuntimeError: replica gone\n").startswith("max_model_len")


def test_foreign_error_keeps_its_name():
    assert reason("Traceback:\n  File x\nOSError: demo is not a folder") == "OSError: demo is not a folder"


def test_text_without_an_error_gives_its_first_line():
    assert reason("No node has 8 GPUs.\nPending since 10 s.") == "No node has 8 GPUs."


def test_long_reason_is_cut():
    assert len(reason("ValueError: " + "x" * 5000)) < 700
