"""One JSON object on a line, whatever names of files it holds."""

import json
import re
from typing import Any

import orjson


def json_line(record: dict[str, Any]) -> bytes:
    """A record on one line, its end included."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A file name that is not UTF-8: its odd bytes are shown as \xff, in JSON's own writing.
        text = json.dumps(record, default=str, ensure_ascii=False)
        shown = re.sub("[\ud800-\udfff]", lambda odd: rf"\\x{ord(odd[0]) & 255:02x}", text)
        return shown.encode() + b"\n"
