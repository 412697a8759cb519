"""What serving DeepSeek-R1 on other machines would take: step times from measured kernels, a fleet from step times."""
