CREATE TABLE IF NOT EXISTS site (
    id BIGINT PRIMARY KEY CHECK (id = 1),
    version BIGINT NOT NULL,
    directory TEXT NOT NULL,
    path TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT COLLATE "C" PRIMARY KEY,
    token TEXT NOT NULL,
    place TEXT NOT NULL,
    state TEXT NOT NULL,
    addresses TEXT NOT NULL,
    version TEXT NOT NULL,
    started_ms BIGINT NOT NULL,
    term_ms BIGINT NOT NULL,
    ends_ms BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS held (
    domain TEXT COLLATE "C" NOT NULL,
    image TEXT COLLATE "C" NOT NULL,
    what TEXT NOT NULL,
    token TEXT NOT NULL,
    key TEXT NOT NULL,
    PRIMARY KEY (domain, image, what)
);
CREATE TABLE IF NOT EXISTS mounts (
    domain TEXT COLLATE "C" NOT NULL,
    image TEXT COLLATE "C" NOT NULL,
    node TEXT COLLATE "C" NOT NULL,
    writes BIGINT NOT NULL,
    PRIMARY KEY (domain, image, node)
);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT COLLATE "C" PRIMARY KEY,
    terms BYTEA NOT NULL,
    term_ms BIGINT NOT NULL,
    begun_ms BIGINT NOT NULL,
    ends_ms BIGINT NOT NULL
);
CREATE TABLE IF NOT EXISTS units (
    job TEXT COLLATE "C" NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    nth BIGINT NOT NULL,
    item BYTEA NOT NULL,
    state TEXT NOT NULL,
    token TEXT NOT NULL,
    node TEXT NOT NULL,
    said BYTEA NOT NULL,
    PRIMARY KEY (job, nth)
);
INSERT INTO site VALUES (1, 1, '', '') ON CONFLICT DO NOTHING;
