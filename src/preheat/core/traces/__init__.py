"""Cold-start records on their way out: files of our own, Chrome/Perfetto traces, OpenTelemetry.

What does not belong here: making records (``core.coldstart``) and drawing them (``cli.waterfall``).
"""
