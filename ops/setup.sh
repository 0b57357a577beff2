#!/bin/sh
# Creates the tables of SEMEL_DB and the first tokens: the admin's and Prometheus's. It may be run again.
set -eu
tokens=${SEMEL_TOKENS:-/tokens}
semel migrate "$SEMEL_DB"
umask 077
for who in admin:admin prometheus:operator; do
    user=${who%:*}
    if [ -s "$tokens/$user" ]; then continue; fi
    semel token create --user "$user" --role "${who#*:}" --db "$SEMEL_DB" >"$tokens/$user.new"
    mv "$tokens/$user.new" "$tokens/$user"
done
chmod 644 "$tokens/prometheus" # Prometheus runs as another user
