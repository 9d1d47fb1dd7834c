"""SGX and TDX: quotes, their collateral, TCB levels, and where a quote is had from."""
