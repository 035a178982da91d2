"""What the operator may ask and do over HTTP, under `/admin/`."""
