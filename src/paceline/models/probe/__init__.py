"""The probe behind a drafter's fingerprint: a draft computation cut into stages that can be replayed one by one."""
