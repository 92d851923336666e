"""The kinds of journal entries that `journalctl -x` explains: a MESSAGE_ID each.

units/honed.catalog has the explanations. An id is never changed or reused: people filter by it.
"""

from __future__ import annotations

from honed.system.error import BY_CODE

# The daemon.
READY = "ef8265c427fe4b889acb1bd57657add4"
STOPPING = "1119b5db587b418db294a06b5f41b72e"
RELOADED = "e573b743ea4145e48f2b70f496a435b2"
CONFIG_REFUSED = "4dc75a62dd18438ebc00d93882c1a5ec"
DEGRADED = "87bae90fda104d74a2bc684f8b8a3761"
RECOVERED = "9a3b3a943e354eec8cccfcfb513115ba"
DATABASE_DAMAGED = "184c3226c40a48638d15308a34a35c8a"
ENTRY_DAMAGED = "78644fdf6a4644638d81fb52131ef2c1"

# Jobs.
ACCEPTED = "3a7874d9496e44d9b3228ebcce15ac74"
STARTED = "fbf91b37745a4d06a26e6a7da65e37de"
CHECKPOINT = "84d7743de16343a8aa29122dd237f2eb"
FALLBACK = "4349bef3871a417f8f748db8ca4db578"
ADJUSTED = "8bd9c149bac3413f8467c5b687c9ad0b"
WAITS_FOR_ROOM = "93750124ec124e88a0977beb50fb0fd2"
SUCCEEDED = "73d48b0f3317449b8a3eb9c6998b7332"
CANCELLED = "c759fd8f6ce44f0f9d252c265942999c"
HELD = "30b36169d2354a00bd058db653dbbb36"
PREEMPTED = "0da993b4c0524e67a677fbe040858191"
STOPPED_EARLY = "1e1022571e5f487883df05646418bc67"
EDITED = "eda5f9564c4341728c025e7b7dbc86cb"

# Deliveries.
SEND_TROUBLE = "e0667d14dedd4c4abfba1687512da374"
ROW_REFUSED = "2a9bb934a52d406f910f0bcb28322fcc"
ROWS_LOST = "1e838fd06ace4535b06f7c710166d926"
NOTICE_TROUBLE = "ee862292747b48beb5a43e1605b63291"
NOTICE_REFUSED = "b34447786c7c437ba26362b59dd55001"

#: The kind of every error, by its code: it is declared with the error's class.
BY_ERROR = {code: error.message_id for code, error in BY_CODE.items()}


def of_error(code: str) -> str:
    """Return the kind of an error code; for an unknown one, that of an internal error."""
    return BY_ERROR.get(code, BY_ERROR["error"])
