"""The gateway: Envoy, told by files what to route, telling by its access log what was routed.

What does not belong here: starting the process (the supervisor does).
"""
