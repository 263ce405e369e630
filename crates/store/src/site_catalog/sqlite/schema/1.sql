-- Schema 1, released: never change it.
CREATE TABLE seal (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    schema INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    content INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE settings (
    key TEXT PRIMARY KEY NOT NULL,
    value TEXT NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE peers (
    name TEXT PRIMARY KEY NOT NULL,
    key TEXT UNIQUE NOT NULL,
    addresses TEXT NOT NULL,
    paired_unix INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE tickets (
    secret TEXT PRIMARY KEY NOT NULL,
    created_unix INTEGER NOT NULL,
    expires_unix INTEGER NOT NULL,
    used_by TEXT NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE images (
    name TEXT PRIMARY KEY NOT NULL,
    id INTEGER UNIQUE NOT NULL,
    path BLOB NOT NULL,
    format TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    data_bytes INTEGER NOT NULL,
    virtual_bytes INTEGER NOT NULL,
    digest TEXT NOT NULL,
    stamp TEXT NOT NULL,
    added_unix INTEGER NOT NULL,
    peer TEXT NOT NULL,
    external INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
