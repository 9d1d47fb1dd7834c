"""Strict readers of what vendors sign: DER, X.509, CBOR, COSE, XML signatures."""
