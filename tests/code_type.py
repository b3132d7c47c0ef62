"""Type "code" without a binary format, such as seg and ean13 of contrib, and types that contain it."""

from __future__ import annotations

CODE = """
CREATE TYPE code;
CREATE FUNCTION code_in(cstring) RETURNS code IMMUTABLE STRICT LANGUAGE internal AS 'int4in';
CREATE FUNCTION code_out(code) RETURNS cstring IMMUTABLE STRICT LANGUAGE internal AS 'int4out';
CREATE TYPE code (INPUT = code_in, OUTPUT = code_out, LIKE = int4);
CREATE FUNCTION code_cmp(code, code) RETURNS int IMMUTABLE STRICT LANGUAGE internal AS 'btint4cmp';
"""
for sign, function in (("<", "lt"), ("<=", "le"), ("=", "eq"), (">=", "ge"), (">", "gt")):
    CODE += f"""
    CREATE FUNCTION code_{function}(code, code) RETURNS boolean IMMUTABLE STRICT LANGUAGE internal AS 'int4{function}';
    CREATE OPERATOR {sign} (LEFTARG = code, RIGHTARG = code, FUNCTION = code_{function});
    """
CODE += """
CREATE OPERATOR CLASS code_ops DEFAULT FOR TYPE code USING btree
    AS OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 code_cmp(code, code);
CREATE DOMAIN labeled AS code;
CREATE TYPE pair AS (name text, code code);
CREATE TYPE span AS RANGE (subtype = code, multirange_type_name = spans);
CREATE DOMAIN many AS code[];
CREATE TYPE nested AS (spans span[], many many);
"""
