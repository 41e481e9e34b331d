"""The KVR1 codec: TKV1's closed-loop quantiser, coded with frozen tables and 32 rANS states."""
