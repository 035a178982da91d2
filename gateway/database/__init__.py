"""What outlives the process: tenants and keys made at run time, the ledger, batches, the audit."""
