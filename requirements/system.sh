#!/bin/sh
# Mooncake's Python module links against libibverbs, also when it only speaks TCP.
ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libibverbs1 >/dev/null 2>&1 && exit 0
fi
echo "libibverbs.so.1 is missing and could not be installed here: run 'sudo apt-get install libibverbs1', then make again." >&2
exit 1
