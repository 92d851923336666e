"""The kinds of journal entries that `journalctl -x` explains: a MESSAGE_ID each.

units/honed.catalog has the explanations. An id is never changed or reused: people filter by it.
"""

from __future__ import annotations

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

#: The kind of each error, by its code.
BY_ERROR = {
    "spec_invalid": "d0af395785874ddeb04faeec6a2c0aa4",
    "dataset_invalid": "24a60176db434f8399cf5898d64c4c56",
    "model_invalid": "6f804e657f364761b0ea25709a1be694",
    "precision_mismatch": "14bfde8a94304347b84fee2b67d6f82b",
    "mask_invalid": "31b10404f6e24275ac8ced0d98706bc7",
    "loss_mismatch": "1b5151d11ddc4a15a9574499c463171d",
    "memory_insufficient": "3ee3fcd3adeb413ba19cc1fac94984a8",
    "disk_insufficient": "443438c1d40743ee93a5fcb2d9494bb9",
    "backend_unavailable": "f71ddfa85a88494a9de6b17249e16eca",
    "time_limit": "3fe1ca692ba0430db5f01a6f1028f8a7",
    "out_of_memory": "af187078ace14253aee6769740b0157f",
    "diverged": "270981e1204e405b9f9fe28c8a1caa34",
    "stalled": "e0af951fba68482fae9e801ddbfe3e71",
    "regressed": "6423d527204f43bf92fc51381083f032",
    "interrupted": "39f45bc572bd488b9b73533540ba5818",
    "killed": "d28b1d4f69084e50921f2e91dce8e281",
    "environment_invalid": "21b351d0277d47d79d2fcab1eea24aac",
    "cluster_refused": "22f086c1f2894aefa7e5e54fdcf17360",
    "error": "1309030d35e449caa2442b3c1f6c8c59",
    "not_permitted": "dbad8421069948a49b43daaa4f2aac6d",
    "usage": "5b58aff6b6e44d97b47234122bdfbaa4",
}


def of_error(code: str) -> str:
    """Return the kind of an error code; for an unknown one, that of an internal error."""
    return BY_ERROR.get(code, BY_ERROR["error"])
