"""GPUs in confidential mode: signed measurements, reference manifests, the driver."""
