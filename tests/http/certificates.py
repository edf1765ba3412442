"""Certificates for tests: made here, valid for 127.0.0.1 and localhost.

`write_pair` gives a self-signed one; `write_chain` one of a private authority, with an intermediate between.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key; clients trust the `cert` of a self-signed one."""

    cert: Path
    key: Path

    @property
    def config(self) -> dict[str, str]:
        return {"cert": str(self.cert), "key": str(self.key)}

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number


def write_pair(folder: Path, name: str = "own", passphrase: bytes | None = None) -> Pair:
    issued = _issue("localhost")
    return _write(folder, name, [issued.certificate], issued.key, passphrase)


def write_chain(folder: Path) -> tuple[Pair, Path]:
    """The files that a service takes, and the authority's certificate, which clients take."""
    root = _issue("authority", authority=True)
    between = _issue("intermediate", root, authority=True)
    issued = _issue("localhost", between)
    trusted = folder / "ca.pem"
    trusted.write_bytes(root.certificate.public_bytes(serialization.Encoding.PEM))
    return _write(folder, "chain", [issued.certificate, between.certificate], issued.key), trusted


@dataclass(frozen=True)
class _Issued:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _issue(name: str, by: _Issued | None = None, authority: bool = False) -> _Issued:
    """A certificate signed by `by`, or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return _Issued(builder.sign(by.key if by else key, hashes.SHA256()), key)


def _write(
    folder: Path,
    name: str,
    chain: list[x509.Certificate],
    key: ec.EllipticCurvePrivateKey,
    passphrase: bytes | None = None,
) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    encryption = (
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    )
    pair.cert.write_bytes(b"".join(one.public_bytes(serialization.Encoding.PEM) for one in chain))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    return pair
