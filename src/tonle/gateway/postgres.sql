-- What gateways share in PostgreSQL. Made once, by the first gateway; `postgres.py` knows its version.
-- Names are prefixed and unqualified: they live in the schema that the role's search_path names first.

CREATE TABLE tonle_schema (version integer NOT NULL);

CREATE TABLE tonle_keys (id text PRIMARY KEY, document bytea NOT NULL);
CREATE TABLE tonle_keys_version (number bigint NOT NULL);
INSERT INTO tonle_keys_version VALUES (0);
CREATE TABLE tonle_secrets (name text PRIMARY KEY, value text NOT NULL);

-- One row per key that was ever charged. Levels of a bucket that was never used are NULL; times are unix seconds.
CREATE TABLE tonle_accounts (
    key_id text PRIMARY KEY,
    requests double precision,
    requests_at double precision,
    tokens double precision,
    tokens_at double precision,
    day date,
    used bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50); -- rows change all the time: leave room to do so in place

-- Running requests. They need no log: after a crash their gateways bring them back when they renew them.
CREATE UNLOGGED TABLE tonle_leases (
    id text PRIMARY KEY,
    key_id text NOT NULL,
    tokens bigint NOT NULL,
    expires_at double precision NOT NULL
);
CREATE INDEX tonle_leases_by_key ON tonle_leases (key_id);

-- Every change to an account or its leases locks the account's row; several rows are locked in the order of their names.
-- So changes to one key are serialized, and there are no deadlocks.
CREATE FUNCTION tonle_lock(the_keys text[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO tonle_accounts (key_id) SELECT DISTINCT name FROM unnest(the_keys) AS name ORDER BY name
        ON CONFLICT DO NOTHING;
    PERFORM 1 FROM tonle_accounts WHERE key_id = ANY (the_keys) ORDER BY key_id FOR UPDATE;
END $$;

CREATE FUNCTION tonle_now() RETURNS double precision LANGUAGE sql VOLATILE AS
    'SELECT extract(epoch FROM clock_timestamp())::double precision';

CREATE FUNCTION tonle_today() RETURNS date LANGUAGE sql VOLATILE AS
    'SELECT (clock_timestamp() AT TIME ZONE ''UTC'')::date';

CREATE FUNCTION tonle_use(the_key text, amount bigint) RETURNS void LANGUAGE sql AS $$
    UPDATE tonle_accounts
    SET day = tonle_today(), used = amount + CASE WHEN day = tonle_today() THEN used ELSE 0 END
    WHERE key_id = the_key
$$;

-- What is in a bucket now. One that was never used is full.
CREATE FUNCTION tonle_level(before double precision, at double precision, max_level bigint, now_s double precision)
RETURNS double precision LANGUAGE sql IMMUTABLE AS
    'SELECT coalesce(least(max_level, before + greatest(0, now_s - at) * max_level / 60), max_level)';

-- NULL: it may run, and is charged. Else the limit that is in its way, and for how long.
CREATE FUNCTION tonle_charge(the_lease text, the_key text, amount bigint, lease_s double precision,
                             per_minute bigint, tokens_per_minute bigint, at_once bigint, per_day bigint,
                             OUT limit_name text, OUT wait_s double precision) LANGUAGE plpgsql AS $$
DECLARE
    account tonle_accounts;
    now_s double precision;
    lost bigint;
    used_today bigint;
    request_level double precision;
    token_level double precision;
BEGIN
    PERFORM tonle_lock(ARRAY[the_key]);
    IF EXISTS (SELECT 1 FROM tonle_leases WHERE id = the_lease) THEN RETURN; END IF;
    now_s := tonle_now();
    WITH ended AS (DELETE FROM tonle_leases WHERE key_id = the_key AND expires_at <= now_s RETURNING tokens)
        SELECT sum(tokens) INTO lost FROM ended;
    IF lost > 0 THEN PERFORM tonle_use(the_key, lost); END IF;
    SELECT * INTO account FROM tonle_accounts WHERE key_id = the_key;

    IF (SELECT count(*) FROM tonle_leases WHERE key_id = the_key) >= at_once THEN
        limit_name := 'max_concurrent'; wait_s := 1; RETURN;
    END IF;
    IF per_day IS NOT NULL THEN
        used_today := CASE WHEN account.day = tonle_today() THEN account.used ELSE 0 END;
        limit_name := 'tokens_per_day';
        wait_s := 86400 - (now_s - floor(now_s / 86400) * 86400);
        IF used_today >= per_day THEN RETURN; END IF;
        used_today := used_today + coalesce((SELECT sum(tokens) FROM tonle_leases WHERE key_id = the_key), 0);
        wait_s := 1;
        IF used_today >= per_day THEN RETURN; END IF;
    END IF;
    IF per_minute IS NOT NULL THEN
        request_level := tonle_level(account.requests, account.requests_at, per_minute, now_s);
        limit_name := 'requests_per_minute';
        wait_s := (1 - request_level) * 60 / per_minute;
        IF wait_s > 0 THEN RETURN; END IF;
    END IF;
    IF tokens_per_minute IS NOT NULL THEN
        token_level := tonle_level(account.tokens, account.tokens_at, tokens_per_minute, now_s);
        limit_name := 'tokens_per_minute';
        wait_s := (least(amount, tokens_per_minute) - token_level) * 60 / tokens_per_minute;
        IF wait_s > 0 THEN RETURN; END IF;
    END IF;

    UPDATE tonle_accounts
        SET requests = request_level - 1, requests_at = now_s, tokens = token_level - amount, tokens_at = now_s
        WHERE key_id = the_key;
    INSERT INTO tonle_leases VALUES (the_lease, the_key, amount, now_s + lease_s);
    limit_name := NULL; wait_s := NULL;
END $$;

-- Arrays in parallel, one place per request that has ended; a lease of '' was never charged.
-- A lease that is gone is charged in full, never refunded.
CREATE FUNCTION tonle_settle(the_leases text[], the_keys text[], amounts bigint[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    charged bigint;
BEGIN
    PERFORM tonle_lock(the_keys);
    FOR i IN 1 .. cardinality(the_keys) LOOP
        DELETE FROM tonle_leases WHERE id = the_leases[i] RETURNING tokens INTO charged;
        UPDATE tonle_accounts SET tokens = tokens - (amounts[i] - coalesce(charged, 0)) WHERE key_id = the_keys[i];
        IF amounts[i] > 0 THEN PERFORM tonle_use(the_keys[i], amounts[i]); END IF;
    END LOOP;
END $$;

CREATE FUNCTION tonle_renew(the_leases text[], the_keys text[], amounts bigint[], lease_s double precision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM tonle_lock(the_keys);
    INSERT INTO tonle_leases
        SELECT lease, name, amount, tonle_now() + lease_s
        FROM unnest(the_leases, the_keys, amounts) AS each (lease, name, amount)
        ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at;
END $$;
