"""Hide passwords, tokens and logins before a text is saved or shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_SECRET = re.compile(r"token|secret|passw(or)?d|passphrase|api[-_]?key|credential|authorization", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_login(address: str) -> str:
    """https://name:password@host/ -> https://***@host/."""
    return _LOGIN.sub(f"{HIDDEN}@", address)


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """A command line whose values of --token X, --token=X, name.api_key=X and logins in addresses are hidden."""
    out: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = bool(_SECRET.search(name))
        if hide_next:
            out.append(HIDDEN)
        elif equals and secret:
            out.append(f"{name}={HIDDEN}")
        else:
            out.append(without_login(argument))
        hide_next = not hide_next and secret and not equals and argument.startswith("-")
    return out
