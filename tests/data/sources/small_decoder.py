"""The process that decodes Parquet, with so little memory that a test can exceed it."""

from phalanx.data.sources import parquet_process

if __name__ == "__main__":
    parquet_process.MEMORY_BYTES = 24 << 20
    parquet_process.main()
