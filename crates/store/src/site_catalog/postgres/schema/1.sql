-- Schema 1 on PostgreSQL, released: never change it.
CREATE TABLE seal (
    id BIGINT PRIMARY KEY CHECK (id = 1),
    schema BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    rows BIGINT NOT NULL,
    content BIGINT NOT NULL,
    sum BIGINT NOT NULL
);
CREATE TABLE settings (
    key TEXT COLLATE "C" PRIMARY KEY,
    value TEXT NOT NULL,
    sum BIGINT NOT NULL
);
CREATE TABLE peers (
    name TEXT COLLATE "C" PRIMARY KEY,
    key TEXT UNIQUE NOT NULL,
    addresses TEXT NOT NULL,
    paired_unix BIGINT NOT NULL,
    rights TEXT NOT NULL,
    domain TEXT NOT NULL,
    quota_bytes BIGINT NOT NULL,
    sum BIGINT NOT NULL
);
CREATE TABLE tickets (
    secret TEXT COLLATE "C" PRIMARY KEY,
    created_unix BIGINT NOT NULL,
    expires_unix BIGINT NOT NULL,
    used_by TEXT NOT NULL,
    rights TEXT NOT NULL,
    domain TEXT NOT NULL,
    quota_bytes BIGINT NOT NULL,
    name TEXT NOT NULL,
    sum BIGINT NOT NULL
);
CREATE TABLE images (
    name TEXT COLLATE "C" PRIMARY KEY,
    id BIGINT UNIQUE NOT NULL,
    path BYTEA NOT NULL,
    format TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    data_bytes BIGINT NOT NULL,
    virtual_bytes BIGINT NOT NULL,
    digest TEXT NOT NULL,
    stamp TEXT NOT NULL,
    added_unix BIGINT NOT NULL,
    peer TEXT NOT NULL,
    external BIGINT NOT NULL,
    owner TEXT NOT NULL,
    shared TEXT NOT NULL,
    sum BIGINT NOT NULL
);
