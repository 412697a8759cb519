"""TLS to a router: whom a worker or a command trusts, and the certificate that it shows."""

from __future__ import annotations

import ssl
from pathlib import Path


def tls_context(
    ca_file: Path | None = None, identity: tuple[Path, Path] | None = None
) -> ssl.SSLContext:
    """Trusts what the CAs in `ca_file` (PEM) signed, or what the system trusts.

    Shows a certificate where a router asks for one; `identity` is its file and that of its key. Raises ValueError for
    files that cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"cannot use {ca_file} for TLS: {error}") from error
    if identity is not None:
        certificate, key = identity
        try:
            context.load_cert_chain(certificate, key, password=no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ValueError(f"cannot use {certificate} with {key} for TLS: {error}") from error
    return context


def no_password() -> str:
    """In the place of a prompt in the terminal of a worker."""
    raise ValueError("the key asks for a password")
